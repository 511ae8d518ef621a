// Runs what a group of calls asked for: all transfers of the group are in flight together, on the
// worker thread of the stream.
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>

#include "nccl_core.h"

namespace nccl {
namespace {

constexpr int poll_ms = 20;

// Precedes the data of each transfer; both sides must state the same.
struct Header {
    uint32_t magic = 0xE3C0117E;
    int32_t kind = 0, type = 0, op = 0, root = 0;
    uint32_t pad = 0;
    uint64_t count = 0, bytes = 0;
};

std::string describe(const Header& h) {
    static const char* const types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                                        "float16", "float32", "float64", "bfloat16", "float8e4m3",
                                        "float8e5m2"};
    static const char* const ops[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
    auto kind = static_cast<Kind>(h.kind);
    std::string text = std::string(name_of(kind)) + "(count " + std::to_string(h.count) +
                       ", type " + (h.type >= 0 && h.type < ncclNumTypes ? types[h.type] : "?");
    if (kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter)
        text += std::string(", op ") + (h.op >= 0 && h.op <= ncclNumOps ? ops[h.op] : "?");
    if (h.root >= 0) text += ", root " + std::to_string(h.root);
    return text + ")";
}

struct Sending {
    Header header;
    const char* data = nullptr;
    size_t moved = 0;
};
struct Receiving {
    Header expected, got;
    char* data = nullptr;
    size_t moved = 0;
};
struct Peer {
    std::deque<Sending> out;
    std::deque<Receiving> in;
    bool gone = false;
};

bool has_root(Kind kind) {
    return kind == Kind::broadcast || kind == Kind::reduce || kind == Kind::gather ||
           kind == Kind::scatter;
}

class Group {
public:
    Group(ncclComm* comm, std::vector<Call>& calls)
        : comm_(comm), calls_(calls), peers_(comm->ranks) {}

    void run() {
        for (Call& call : calls_) plan(call);
        while (work_left() && !comm_->stopped) {
            if (!move_some()) return;
        }
        if (comm_->stopped) return;
        for (Reducing& reducing : reducing_) finish(reducing);
        for (Call& call : calls_) copy_own_part(call);
        copy_to_self();
    }

private:
    struct Reducing {
        Call* call;
        std::vector<std::vector<char>> parts;  // one of each rank
    };

    // What both sides must agree on, with `bytes` of data behind it.
    Header header_of(const Call& call, size_t bytes) const {
        Header h;
        // A send and its recv carry the same header.
        h.kind = static_cast<int>(call.kind == Kind::recv ? Kind::send : call.kind);
        h.type = call.type;
        h.op = call.reduction.op;
        h.root = has_root(call.kind) ? call.peer : -1;
        h.count = call.count;
        h.bytes = bytes;
        return h;
    }

    void send(int peer, const Call& call, const char* data) {
        peers_[peer].out.push_back({header_of(call, call.bytes()), data, 0});
    }
    void receive(int peer, const Call& call, char* data) {
        expect(peer, header_of(call, call.bytes()), data);
    }
    void expect(int peer, const Header& header, char* data) {
        Receiving receiving;
        receiving.expected = header;
        receiving.data = data;
        peers_[peer].in.push_back(receiving);
    }
    // Every rank states every collective to every other, also where no data goes: two ranks that
    // both think to be the root of a broadcast would otherwise only wait.
    void announce(int peer, const Call& call) {
        if (call.kind == Kind::send || call.kind == Kind::recv) return;
        peers_[peer].out.push_back({header_of(call, 0), nullptr, 0});
        expect(peer, header_of(call, 0), nullptr);
    }

    bool reduces_here(const Call& call) const {
        return call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter ||
               (call.kind == Kind::reduce && comm_->rank == call.peer);
    }

    void plan(Call& call) {
        size_t bytes = call.bytes();
        int me = comm_->rank;
        bool root = me == call.peer;
        if (reduces_here(call))
            reducing_.push_back({&call, std::vector<std::vector<char>>(comm_->ranks)});
        for (int peer = 0; peer < comm_->ranks; peer++) {
            if (peer == me) continue;
            announce(peer, call);
            if (reduces_here(call)) {
                auto& part = reducing_.back().parts[peer];
                part.resize(bytes);
                receive(peer, call, part.data());
            }
            const char* part_of_peer = call.send + peer * bytes;
            char* place_of_peer = call.recv + peer * bytes;
            switch (call.kind) {
                case Kind::all_reduce: send(peer, call, call.send); break;
                case Kind::reduce_scatter: send(peer, call, part_of_peer); break;
                case Kind::reduce:
                    if (peer == call.peer) send(peer, call, call.send);
                    break;
                case Kind::broadcast:
                    if (root) send(peer, call, call.send);
                    else if (peer == call.peer) receive(peer, call, call.recv);
                    break;
                case Kind::all_gather:
                    send(peer, call, call.send);
                    receive(peer, call, place_of_peer);
                    break;
                case Kind::all_to_all:
                    send(peer, call, part_of_peer);
                    receive(peer, call, place_of_peer);
                    break;
                case Kind::gather:
                    if (root) receive(peer, call, place_of_peer);
                    else if (peer == call.peer) send(peer, call, call.send);
                    break;
                case Kind::scatter:
                    if (root) send(peer, call, part_of_peer);
                    else if (peer == call.peer) receive(peer, call, call.recv);
                    break;
                case Kind::send:
                    if (peer == call.peer) send(peer, call, call.send);
                    break;
                case Kind::recv:
                    if (peer == call.peer) receive(peer, call, call.recv);
                    break;
            }
        }
    }

    bool work_left() const {
        return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
            return !peer.out.empty() || !peer.in.empty();
        });
    }

    // False: the group has failed (and the communicator has been stopped since).
    bool move_some() {
        std::vector<pollfd> pollers;
        std::vector<int> ranks;
        for (int rank = 0; rank < comm_->ranks; rank++) {
            const Peer& peer = peers_[rank];
            int events = (peer.out.empty() ? 0 : POLLOUT) | (peer.in.empty() ? 0 : POLLIN);
            if (!events || peer.gone) continue;
            pollers.push_back({comm_->data[rank], static_cast<short>(events), 0});
            ranks.push_back(rank);
        }
        poll(pollers.data(), pollers.size(), poll_ms);
        for (size_t i = 0; i < pollers.size(); i++) {
            short events = pollers[i].revents;
            bool gone = false;
            if (events & POLLIN) {
                if (!receive_some(ranks[i], gone)) return false;
            } else if (events & (POLLHUP | POLLERR)) {
                gone = true;
            }
            if (!gone && events & POLLOUT) send_some(ranks[i], gone);
            if (gone && !read_the_rest(ranks[i])) return false;
            if (gone && !lose(ranks[i])) return false;
        }
        return true;
    }

    // What a peer sent before it went may explain why it went. False: as receive_some.
    bool read_the_rest(int rank) {
        bool gone = false;
        for (size_t before = received_ + 1; before != received_ && !peers_[rank].in.empty();) {
            before = received_;
            if (!receive_some(rank, gone)) return false;
        }
        return true;
    }

    // False: what arrives is not what this rank expects.
    bool receive_some(int rank, bool& gone) {
        Receiving& r = peers_[rank].in.front();
        constexpr size_t head = sizeof(Header);
        bool in_header = r.moved < head;
        char* to = in_header ? reinterpret_cast<char*>(&r.got) + r.moved : r.data + r.moved - head;
        size_t left = in_header ? head - r.moved : head + r.expected.bytes - r.moved;
        ssize_t moved = recv(comm_->data[rank], to, left, MSG_DONTWAIT);
        if (moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR)) gone = true;
        if (moved <= 0) return true;
        received_ += static_cast<size_t>(moved);
        r.moved += static_cast<size_t>(moved);
        if (in_header && r.moved >= head && memcmp(&r.got, &r.expected, head) != 0) {
            std::string text = format("mismatched calls: rank %d calls %s where rank %d calls %s",
                                      comm_->rank, describe(r.expected).c_str(), rank,
                                      describe(r.got).c_str());
            emu_report("mismatch", text.c_str());
            state_own_call(rank);
            fail_group(ncclInternalError, text);
            return false;
        }
        if (r.moved == head + r.expected.bytes) peers_[rank].in.pop_front();
        return true;
    }

    // So that the other side learns of the mismatch too, before this one is aborted.
    void state_own_call(int rank) {
        auto& out = peers_[rank].out;
        bool gone = false;
        while (!out.empty() && out.front().moved < sizeof(Header) && !gone && !comm_->stopped) {
            pollfd poller{comm_->data[rank], POLLOUT, 0};
            poll(&poller, 1, poll_ms);
            send_some(rank, gone);
        }
    }

    void send_some(int rank, bool& gone) {
        Sending& s = peers_[rank].out.front();
        constexpr size_t head = sizeof(Header);
        bool in_header = s.moved < head;
        const char* from =
            in_header ? reinterpret_cast<const char*>(&s.header) + s.moved
                      : s.data + s.moved - head;
        size_t left = in_header ? head - s.moved : head + s.header.bytes - s.moved;
        ssize_t moved = ::send(comm_->data[rank], from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved < 0 && errno != EAGAIN && errno != EINTR) gone = true;
        if (moved > 0) s.moved += static_cast<size_t>(moved);
        if (s.moved == head + s.header.bytes) peers_[rank].out.pop_front();
    }

    // A peer's socket is closed: an error at once, or (as on networks that do not tell) silence.
    bool lose(int rank) {
        peers_[rank].gone = true;
        if (!peer_death_is_error()) return true;
        fail_group(ncclRemoteError, "peer rank " + std::to_string(rank) +
                                    " is gone: remote process exited or there was a network error");
        return false;
    }

    // Like the real kernel, the operation stays on its stream until the communicator is aborted.
    void fail_group(ncclResult_t code, const std::string& text) {
        set_async_error(comm_, code, text);
        Lock lock(comm_->mutex);
        while (!comm_->stopped) comm_->changed.wait_for(lock, std::chrono::milliseconds(poll_ms));
    }

    void finish(Reducing& reducing) {
        Call& call = *reducing.call;
        size_t bytes = call.bytes();
        int me = comm_->rank;
        const char* own = call.kind == Kind::reduce_scatter ? call.send + me * bytes : call.send;
        reducing.parts[me].assign(own, own + bytes);
        std::vector<char> acc;
        for (int rank = 0; rank < comm_->ranks; rank++) {
            auto& part = reducing.parts[rank];
            if (call.reduction.op == ncclAvg)  // PreMulSum has been scaled by the sender
                scale_input(part.data(), call.count, call.type, call.reduction, comm_->ranks);
            if (rank == 0) acc = std::move(part);
            else reduce_into(acc.data(), part.data(), call.count, call.type, call.reduction.op);
        }
        finish_reduction(acc.data(), call.count, call.type, call.reduction.op, comm_->ranks);
        memcpy(call.recv, acc.data(), bytes);
    }

    void copy_own_part(const Call& call) {
        size_t bytes = call.bytes();
        int me = comm_->rank;
        bool root = me == call.peer;
        size_t offset = static_cast<size_t>(me) * bytes;
        if (call.kind == Kind::broadcast && root) move(call.recv, call.send, bytes);
        if (call.kind == Kind::all_gather) move(call.recv + offset, call.send, bytes);
        if (call.kind == Kind::all_to_all) move(call.recv + offset, call.send + offset, bytes);
        if (call.kind == Kind::gather && root) move(call.recv + offset, call.send, bytes);
        if (call.kind == Kind::scatter && root) move(call.recv, call.send + offset, bytes);
    }

    void copy_to_self() {
        std::deque<Call*> sends, recvs;
        for (Call& call : calls_) {
            if (call.peer != comm_->rank) continue;
            if (call.kind == Kind::send) sends.push_back(&call);
            if (call.kind == Kind::recv) recvs.push_back(&call);
        }
        for (size_t i = 0; i < sends.size() && i < recvs.size(); i++)
            move(recvs[i]->recv, sends[i]->send, std::min(sends[i]->bytes(), recvs[i]->bytes()));
    }

    static void move(char* to, const char* from, size_t bytes) {
        if (to != from) memmove(to, from, bytes);
    }

    ncclComm* comm_;
    std::vector<Call>& calls_;
    std::vector<Peer> peers_;
    std::deque<Reducing> reducing_;
    size_t received_ = 0;  // bytes, headers included
};

// ---- one collective at a time on a device (EMU_NCCL_SERIAL=1) --------------------------------
// The real library's kernels of different communicators can keep each other from running: with
// this, ranks that issue two communicators' operations in different orders hang, as there.
std::mutex& device_mutex = *new std::mutex;
std::condition_variable& device_free = *new std::condition_variable;
std::map<int, bool>& device_taken = *new std::map<int, bool>;

bool serial_mode() {
    static const char* text = getenv("EMU_NCCL_SERIAL");
    return text && strcmp(text, "1") == 0;
}

bool take_device(ncclComm* comm) {
    if (!serial_mode()) return true;
    Lock lock(device_mutex);
    while (device_taken[comm->device]) {
        if (comm->stopped) return false;
        device_free.wait_for(lock, std::chrono::milliseconds(poll_ms));
    }
    return device_taken[comm->device] = true;
}

void release_device(ncclComm* comm) {
    if (!serial_mode()) return;
    Lock lock(device_mutex);
    device_taken[comm->device] = false;
    device_free.notify_all();
}

// ---- the job on the stream ------------------------------------------------------------------
struct Job {
    ncclComm* comm;
    std::vector<Call> calls;
    std::vector<std::vector<char>> scaled;
    uint64_t ticket;
};

// PreMulSum's factor belongs to the rank, so each rank sends its input scaled.
void scale_before_sending(Job& job) {
    for (Call& call : job.calls) {
        if (call.reduction.op != ncclNumOps) continue;
        bool scatter = call.kind == Kind::reduce_scatter;
        size_t count = call.count * (scatter ? static_cast<size_t>(job.comm->ranks) : 1);
        job.scaled.emplace_back(call.send, call.send + count * size_of(call.type));
        char* copy = job.scaled.back().data();
        scale_input(copy, count, call.type, call.reduction, job.comm->ranks);
        call.send = copy;
    }
}

void run_job(void* user) {
    std::unique_ptr<Job> job(static_cast<Job*>(user));
    ncclComm* comm = job->comm;
    {
        // Not counted as order by the race check: the real library promises none across streams.
        Lock lock(comm->mutex);
        while (comm->finished != job->ticket && !comm->stopped)
            comm->changed.wait_for(lock, std::chrono::milliseconds(poll_ms));
        comm->running = !comm->stopped;
    }
    if (comm->running && take_device(comm)) {
        random_delay();
        scale_before_sending(*job);
        Group(comm, job->calls).run();
        random_delay();
        release_device(comm);
    }
    Lock lock(comm->mutex);
    comm->running = false;
    comm->finished++;
    comm->changed.notify_all();
}

// What a call reads and writes on this rank.
void add_ranges(const ncclComm* comm, const Call& call, std::vector<EmuRange>& ranges) {
    size_t bytes = call.bytes(), all = bytes * static_cast<size_t>(comm->ranks);
    bool root = comm->rank == call.peer;
    Kind kind = call.kind;
    bool sends_all = kind == Kind::reduce_scatter || kind == Kind::all_to_all ||
                     (kind == Kind::scatter && root);
    bool receives_all = kind == Kind::all_gather || kind == Kind::all_to_all ||
                        (kind == Kind::gather && root);
    bool reads = kind != Kind::recv &&
                 !((kind == Kind::broadcast || kind == Kind::scatter) && !root);
    bool writes = kind != Kind::send && !((kind == Kind::reduce || kind == Kind::gather) && !root);
    if (reads) ranges.push_back({call.send, sends_all ? all : bytes, EMU_READ});
    if (writes) ranges.push_back({call.recv, receives_all ? all : bytes, EMU_WRITE});
    if (call.reduction.device_scalar)
        ranges.push_back({call.reduction.device_scalar, size_of(call.type), EMU_READ});
}

}  // namespace

void random_delay() {
    static const char* text = getenv("EMU_NCCL_DELAY_US");
    static const unsigned most = text ? static_cast<unsigned>(atoi(text)) : 0;
    if (!most) return;
    static thread_local std::mt19937 random(static_cast<unsigned>(getpid()) * 7919u);
    usleep(random() % (most + 1));
}

void set_async_error(ncclComm* comm, ncclResult_t code, const std::string& text) {
    Lock lock(comm->mutex);
    if (comm->async != ncclSuccess && comm->async != ncclInProgress) return;  // the first counts
    comm->error = text;
    comm->async = code;
}

ncclResult_t enqueue_group(ncclComm* comm, cudaStream_t stream, std::vector<Call> calls) {
    std::vector<EmuRange> ranges;
    std::string label = "nccl";
    for (const Call& call : calls) {
        label += std::string(":") + name_of(call.kind);
        add_ranges(comm, call, ranges);
    }
    for (const EmuRange& range : ranges)
        if (emu_check_range(range.ptr, range.bytes, label.c_str()))
            return fail(ncclInvalidArgument, label + ": a buffer is too small, see the report");
    auto* job = new Job{comm, std::move(calls), {}, 0};
    {
        Lock lock(comm->mutex);
        job->ticket = comm->issued++;
    }
    int error = emu_enqueue(stream, label.c_str(), run_job, job, ranges.data(),
                            static_cast<int>(ranges.size()));
    if (!error) return ncclSuccess;
    Lock lock(comm->mutex);
    comm->issued--;
    delete job;
    return fail(ncclUnhandledCudaError, format("Cuda failure %d: invalid resource handle", error));
}

}  // namespace nccl
