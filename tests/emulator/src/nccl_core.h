// Private to the emulated libnccl: communicators, operations, and what the files share.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "emu.h"

namespace nccl {

using Lock = std::unique_lock<std::mutex>;

// ---- settings -------------------------------------------------------------------------------
int version();                // EMU_NCCL_VERSION
bool peer_death_is_error();   // EMU_NCCL_PEER_DEATH: "error" (default) or "hang"
void random_delay();          // EMU_NCCL_DELAY_US

// ---- errors ---------------------------------------------------------------------------------
// Keeps the text for ncclGetLastError and returns the code.
ncclResult_t fail(ncclResult_t code, const std::string& text);
std::string& last_error();
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// ---- operations -----------------------------------------------------------------------------
enum class Kind : int {
    all_reduce, broadcast, reduce, all_gather, reduce_scatter, send, recv, all_to_all, gather,
    scatter
};
const char* name_of(Kind kind);
size_t size_of(ncclDataType_t type);

// The reduction of one operation, resolved when it is called.
struct Reduction {
    int op = ncclSum;                    // ncclSum...ncclAvg, or ncclNumOps for PreMulSum
    const void* device_scalar = nullptr; // read when the operation runs
    unsigned char scalar[8] = {};
};

struct Call {
    Kind kind;
    const char* send;
    char* recv;
    size_t count;
    ncclDataType_t type;
    Reduction reduction;
    int peer;  // root or peer
    size_t bytes() const { return count * size_of(type); }
};

// nccl_reduce.cpp. acc = acc (op) other; scaling by PreMulSum's factor, by 1/n, or division by n.
void reduce_into(char* acc, const char* other, size_t count, ncclDataType_t type, int op);
void scale_input(char* data, size_t count, ncclDataType_t type, const Reduction& r, int ranks);
void finish_reduction(char* acc, size_t count, ncclDataType_t type, int op, int ranks);

}  // namespace nccl

// ---- communicators --------------------------------------------------------------------------
// Never freed: an operation that is still queued on a stream may look at an aborted one.
struct ncclComm {
    int ranks = 0, rank = 0, device = 0, physical = 0;
    bool blocking = true;
    std::vector<int> data, control;  // sockets to each rank; control serves split and shrink

    std::atomic<int> async{ncclInProgress};
    std::atomic<bool> stopped{false};  // operations in flight return (abort, revoke)
    std::atomic<bool> aborted{false};
    bool revoked = false, finalized = false, closed = false;

    std::mutex mutex;  // guards what follows and `error`
    std::condition_variable changed;
    std::string error;
    uint64_t issued = 0, finished = 0;  // operations run in the order in which they were issued
    bool running = false;
    std::map<int, nccl::Reduction> user_ops;  // PreMulSum
    std::map<int, ncclDataType_t> user_op_types;
    int next_user_op = ncclNumOps;
    std::map<void*, size_t> registered;
    std::map<void*, void*> windows;

    std::mutex control_mutex;  // of what follows, and of the control sockets
    std::condition_variable control_changed;
    unsigned exchanged = 0;
    std::atomic<unsigned> exchanges{0};  // begun; `exchanged` of them are over
    std::thread helper;  // initialisation or another call of a non-blocking communicator
};

namespace nccl {

// nccl_bootstrap.cpp
ncclResult_t new_unique_id(ncclUniqueId* id);
bool valid_unique_id(const ncclUniqueId& id);
ncclResult_t connect_ranks(ncclComm* comm, const ncclUniqueId& id);
// Sends `mine` to each of `members` (ranks of comm) and receives theirs, on the control sockets.
// `turn` is exchanges++ of the thread that the call came from: helper threads begin in any order.
ncclResult_t exchange(ncclComm* comm, unsigned turn, const std::vector<int>& members,
                      const void* mine, void* all, size_t bytes);

// nccl_progress.cpp
ncclResult_t enqueue_group(ncclComm* comm, cudaStream_t stream, std::vector<Call> calls);
void set_async_error(ncclComm* comm, ncclResult_t code, const std::string& text);

// nccl_manage.cpp
bool is_live(ncclComm* comm);
ncclResult_t check_ready(ncclComm* comm, const char* function);

// nccl_api.cpp: the group that the calling thread is in.
bool in_group();
ncclResult_t group_failed(ncclResult_t code);   // remembers it for ncclGroupEnd; returns it
void finish_at_group_end(ncclComm* comm);       // an initialisation under way

}  // namespace nccl
