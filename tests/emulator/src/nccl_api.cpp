// The user API's collectives and group calls: checks, then the queue of the thread's group.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nccl_core.h"

namespace nccl {
namespace {

thread_local std::string thread_error;

// ---- the group of this thread ---------------------------------------------------------------
struct Queued {
    ncclComm* comm;
    cudaStream_t stream;
    Call call;
};
struct ThreadGroup {
    int depth = 0;
    ncclResult_t error = ncclSuccess;
    std::vector<Queued> queue;
    std::vector<ncclComm*> initialising;
};
thread_local ThreadGroup group;

// Calls of one communicator on several streams run on the first; the others are ordered with it
// on both sides, as the real library does.
ncclResult_t launch(ncclComm* comm, const std::vector<Queued>& queued) {
    cudaStream_t first = queued.front().stream;
    std::vector<Call> calls;
    std::vector<cudaStream_t> others;
    for (const Queued& q : queued) {
        calls.push_back(q.call);
        bool known = q.stream == first;
        for (cudaStream_t other : others) known = known || other == q.stream;
        if (!known) others.push_back(q.stream);
    }
    for (cudaStream_t other : others) emu_stream_follow(first, other);
    ncclResult_t result = enqueue_group(comm, first, std::move(calls));
    for (cudaStream_t other : others) emu_stream_follow(other, first);
    return result;
}

// A non-blocking communicator may return before its work is on the stream: events recorded in
// between miss it, which is what EMU_NCCL_ENQUEUE_DELAY_US lets a test show.
unsigned enqueue_delay_us() {
    static const char* text = getenv("EMU_NCCL_ENQUEUE_DELAY_US");
    return text ? static_cast<unsigned>(atoi(text)) : 0;
}

ncclResult_t launch_later(ncclComm* comm, std::vector<Queued> queued) {
    comm->async = ncclInProgress;
    std::thread([comm, queued = std::move(queued)] {
        emu_use_device(comm->device);
        std::this_thread::sleep_for(std::chrono::microseconds(enqueue_delay_us()));
        ncclResult_t result = launch(comm, queued);
        if (result) set_async_error(comm, result, last_error());
        else comm->async = ncclSuccess;
    }).detach();
    return ncclInProgress;
}

bool unmatched_self_send(const std::vector<Queued>& queued) {
    int balance = 0;
    for (const Queued& q : queued)
        if (q.call.peer == q.comm->rank)
            balance += q.call.kind == Kind::send ? 1 : q.call.kind == Kind::recv ? -1 : 0;
    return balance != 0;
}

ncclResult_t launch_queue() {
    std::vector<Queued> queue;
    queue.swap(group.queue);
    std::vector<ncclComm*> order;
    std::map<ncclComm*, std::vector<Queued>> by_comm;
    for (const Queued& q : queue) {
        if (!by_comm.count(q.comm)) order.push_back(q.comm);
        by_comm[q.comm].push_back(q);
    }
    ncclResult_t result = ncclSuccess;
    for (ncclComm* comm : order) {
        auto& queued = by_comm[comm];
        if (unmatched_self_send(queued))
            return fail(ncclInvalidUsage, "Trying to send to self without a matching recv");
        bool later = !comm->blocking && enqueue_delay_us();
        ncclResult_t r = later ? launch_later(comm, queued) : launch(comm, queued);
        if (r != ncclSuccess && r != ncclInProgress) return r;
        if (r == ncclInProgress) result = r;
    }
    return result;
}

// ---- checks of one call ---------------------------------------------------------------------
bool reduces(Kind kind) {
    return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

bool needs_send_buffer(const ncclComm* comm, Kind kind, int root) {
    if (kind == Kind::recv) return false;
    return (kind != Kind::broadcast && kind != Kind::scatter) || comm->rank == root;
}

bool needs_recv_buffer(const ncclComm* comm, Kind kind, int root) {
    if (kind == Kind::send) return false;
    return (kind != Kind::reduce && kind != Kind::gather) || comm->rank == root;
}

ncclResult_t resolve_reduction(ncclComm* comm, const char* name, int op, ncclDataType_t type,
                               Reduction& out) {
    if (type >= ncclFloat8e4m3) {
        emu_report("unknown", "NCCL reductions of float8");
        return fail(ncclInvalidArgument,
                    format("%s : reductions of float8 are not emulated", name));
    }
    if (op >= 0 && op < ncclNumOps) {
        out.op = op;
        return ncclSuccess;
    }
    Lock lock(comm->mutex);
    auto it = comm->user_ops.find(op);
    if (it == comm->user_ops.end())
        return fail(ncclInvalidArgument, format("%s : invalid reduction operation %d", name, op));
    if (comm->user_op_types[op] != type)
        return fail(ncclInvalidArgument,
                    format("%s : reduction type provided by user-created op does not match", name));
    out = it->second;
    return ncclSuccess;
}

ncclResult_t check(ncclComm* comm, Kind kind, const void* send, const void* recv, size_t count,
                   int type, int peer) {
    const char* name = name_of(kind);
    if (type < 0 || type >= ncclNumTypes)
        return fail(ncclInvalidArgument, format("%s : invalid type %d", name, type));
    if (peer < 0 || peer >= comm->ranks)
        return fail(ncclInvalidArgument,
                    format("%s : invalid root %d (root should be in the 0..%d range)", name, peer,
                           comm->ranks));
    if (count && needs_send_buffer(comm, kind, peer) && !send)
        return fail(ncclInvalidArgument, format("%s : sendbuff argument is NULL", name));
    if (count && needs_recv_buffer(comm, kind, peer) && !recv)
        return fail(ncclInvalidArgument, format("%s : recvbuff argument is NULL", name));
    return ncclSuccess;
}

ncclResult_t add(ncclComm* comm, cudaStream_t stream, Kind kind, const void* send, void* recv,
                 size_t count, int type, int op, int peer) {
    ncclResult_t result = check_ready(comm, name_of(kind));
    if (!result) result = check(comm, kind, send, recv, count, type, peer);
    if (result) return group_failed(result);
    auto data_type = static_cast<ncclDataType_t>(type);
    Call call{kind, static_cast<const char*>(send), static_cast<char*>(recv), count, data_type,
              {}, peer};
    if (reduces(kind)) {
        result = resolve_reduction(comm, name_of(kind), op, data_type, call.reduction);
        if (result) return group_failed(result);
    }
    if (emu_noop()) return ncclSuccess;
    // Nothing moves for a count of 0, except that a send and its recv must still meet.
    if (count == 0 && kind != Kind::send && kind != Kind::recv) return ncclSuccess;
    group.queue.push_back({comm, stream, call});
    return in_group() ? ncclSuccess : launch_queue();
}

}  // namespace

bool in_group() { return group.depth > 0; }

ncclResult_t group_failed(ncclResult_t code) {
    if (in_group() && group.error == ncclSuccess) group.error = code;
    return code;
}

void finish_at_group_end(ncclComm* comm) { group.initialising.push_back(comm); }

std::string& last_error() { return thread_error; }

ncclResult_t fail(ncclResult_t code, const std::string& text) {
    thread_error = text;
    static const char* debug = getenv("NCCL_DEBUG");
    if (debug && *debug) fprintf(stderr, "[emunccl] WARN %s\n", text.c_str());
    return code;
}

std::string format(const char* pattern, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

const char* name_of(Kind kind) {
    static const char* const names[] = {"AllReduce", "Broadcast", "Reduce", "AllGather",
                                        "ReduceScatter", "Send", "Recv", "AlltoAll", "Gather",
                                        "Scatter"};
    auto index = static_cast<size_t>(kind);
    return index < sizeof names / sizeof *names ? names[index] : "?";
}

}  // namespace nccl

using nccl::add;
using nccl::fail;
using nccl::Kind;

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::all_reduce, send, recv, count, type, op, 0);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::reduce_scatter, send, recv, count, type, op, 0);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::reduce, send, recv, count, type, op, root);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::all_gather, send, recv, count, type, 0, 0);
}

ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::all_to_all, send, recv, count, type, 0, 0);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::broadcast, send, recv, count, type, 0, root);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return add(comm, stream, Kind::broadcast, buffer, buffer, count, type, 0, root);
}

ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                        ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::gather, send, recv, count, type, 0, root);
}

ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                         ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::scatter, send, recv, count, type, 0, root);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    return add(comm, stream, Kind::send, send, nullptr, count, type, 0, peer);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add(comm, stream, Kind::recv, nullptr, recv, count, type, 0, peer);
}

// ---- group calls ----------------------------------------------------------------------------
ncclResult_t ncclGroupStart() {
    nccl::group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    auto& group = nccl::group;
    if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group.depth > 0) return ncclSuccess;
    ncclResult_t error = group.error;
    group.error = ncclSuccess;
    bool in_progress = false;
    for (ncclComm* comm : group.initialising) {
        if (!comm->blocking) {
            in_progress = true;
            continue;
        }
        comm->helper.join();
        if (comm->async && !error) error = fail(static_cast<ncclResult_t>(comm->async.load()),
                                                comm->error);
    }
    group.initialising.clear();
    if (error) {
        group.queue.clear();
        return error;
    }
    ncclResult_t result = nccl::launch_queue();
    return result == ncclSuccess && in_progress ? ncclInProgress : result;
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
    constexpr unsigned sim_magic = 0x74685283;
    auto& group = nccl::group;
    if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (info && info->magic != sim_magic)
        return fail(ncclInvalidArgument,
                    "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
    group.depth--;
    float microseconds = 10.0f * static_cast<float>(group.queue.size());
    group.queue.clear();
    ncclResult_t error = group.error;
    group.error = ncclSuccess;
    if (info && !error) info->estimatedTime = microseconds;
    return error;
}
