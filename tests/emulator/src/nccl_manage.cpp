// Communicators' life: initialisation, split, shrink, finalize, destroy, abort, revoke, errors,
// registration, user-made reductions.
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <set>

#include "nccl_core.h"

namespace nccl {
namespace {

std::mutex& live_mutex = *new std::mutex;
std::set<ncclComm*>& live = *new std::set<ncclComm*>;

struct Settings {
    bool blocking = true;
};

bool flag_or_unset(int value) {
    return value == NCCL_CONFIG_UNDEF_INT || value == 0 || value == 1;
}

// An older caller's struct is shorter: the fields beyond its `size` keep their defaults.
ncclResult_t read_config(const ncclConfig_t* given, Settings& settings) {
    if (!given) return ncclSuccess;
    constexpr size_t first_layout = offsetof(ncclConfig_t, cgaClusterSize);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (given->magic != NCCL_API_MAGIC || given->version < NCCL_VERSION(2, 14, 0) ||
        given->size < first_layout || given->size > 4096)
        return fail(ncclInvalidArgument,
                    "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    // Stricter than the real library, which would read what it finds: the size must be the one
    // that belongs to the version that the caller states.
    if (given->version == NCCL_VERSION_CODE && given->size != sizeof config)
        return fail(ncclInvalidArgument,
                    format("ncclConfig_t of version %u has size %zu, not %zu", given->version,
                           sizeof config, given->size));
    memcpy(&config, given, std::min(given->size, sizeof config));
    if (!flag_or_unset(config.blocking))
        return fail(ncclInvalidArgument,
                    format("Invalid config blocking attribute value %d", config.blocking));
    auto positive = [](int value) { return value == NCCL_CONFIG_UNDEF_INT || value > 0; };
    auto channels = [&](int low, int high) {
        return positive(low) && positive(high) &&
               (low == NCCL_CONFIG_UNDEF_INT || high == NCCL_CONFIG_UNDEF_INT || low <= high);
    };
    if (config.cgaClusterSize != NCCL_CONFIG_UNDEF_INT && config.cgaClusterSize < 0)
        return fail(ncclInvalidArgument, format("Invalid config cgaClusterSize attribute value %d",
                                                config.cgaClusterSize));
    if (!channels(config.minCTAs, config.maxCTAs))
        return fail(ncclInvalidArgument,
                    format("Invalid config min/max channels attribute value %d/%d", config.minCTAs,
                           config.maxCTAs));
    if (!flag_or_unset(config.splitShare))
        return fail(ncclInvalidArgument,
                    format("Invalid config splitShare attribute value %d", config.splitShare));
    if (!flag_or_unset(config.shrinkShare))
        return fail(ncclInvalidArgument,
                    format("Invalid config shrinkShare attribute value %d", config.shrinkShare));
    settings.blocking = config.blocking != 0;
    return ncclSuccess;
}

ncclComm* new_comm(int ranks, int rank, const Settings& settings) {
    auto* comm = new ncclComm;
    comm->ranks = ranks;
    comm->rank = rank;
    comm->blocking = settings.blocking;
    comm->device = emu_current_device();
    comm->physical = emu_physical_device();
    Lock lock(live_mutex);
    live.insert(comm);
    return comm;
}

// Runs `connect` on a helper thread; a blocking call waits for it, unless it is in a group.
template <class Connect>
ncclResult_t start(ncclComm* comm, ncclComm_t* out, Connect connect) {
    *out = comm;
    comm->helper = std::thread([comm, connect] {
        last_error().clear();
        ncclResult_t result = connect();
        Lock lock(comm->mutex);
        comm->error = last_error();
        comm->async = result;
    });
    if (in_group()) {
        finish_at_group_end(comm);
        return ncclSuccess;
    }
    if (!comm->blocking) return ncclInProgress;
    comm->helper.join();
    auto result = static_cast<ncclResult_t>(comm->async.load());
    if (!result) return ncclSuccess;
    *out = nullptr;
    return fail(result, comm->error);
}

void wait_until_idle(ncclComm* comm) {
    Lock lock(comm->mutex);
    comm->changed.wait(lock, [&] {
        return comm->stopped ? !comm->running : comm->finished == comm->issued;
    });
}

void stop(ncclComm* comm) {
    {
        Lock lock(comm->mutex);
        comm->stopped = true;
        comm->changed.notify_all();
    }
    wait_until_idle(comm);
}

// Frees what the communicator holds; its memory stays (see ncclComm).
void close_comm(ncclComm* comm) {
    if (comm->helper.joinable()) comm->helper.join();
    wait_until_idle(comm);
    {
        Lock lock(live_mutex);
        live.erase(comm);
    }
    Lock lock(comm->mutex);
    for (auto* sockets : {&comm->data, &comm->control})
        for (int& fd : *sockets)
            if (fd >= 0) close(fd), fd = -1;
    comm->stopped = comm->closed = true;  // whatever is still queued does nothing
}

ncclResult_t check_live(ncclComm* comm, const char* function) {
    if (emu_forked()) return fail(ncclUnhandledCudaError, "Cuda failure 3 'initialization error'");
    if (!comm)
        return fail(ncclInvalidArgument, format("%s : comm argument is NULL", function));
    if (!is_live(comm))
        return fail(ncclInvalidArgument,
                    format("comm %p has already been destroyed", static_cast<void*>(comm)));
    return ncclSuccess;
}

std::vector<int> ranks_without(int ranks, const int* excluded, int count) {
    std::vector<int> members;
    for (int rank = 0; rank < ranks; rank++)
        if (std::find(excluded, excluded + count, rank) == excluded + count)
            members.push_back(rank);
    return members;
}

}  // namespace

int version() {
    static const char* text = getenv("EMU_NCCL_VERSION");
    return text ? atoi(text) : NCCL_VERSION_CODE;
}

bool peer_death_is_error() {
    static const char* text = getenv("EMU_NCCL_PEER_DEATH");
    return !text || strcmp(text, "hang") != 0;
}

bool is_live(ncclComm* comm) {
    Lock lock(live_mutex);
    return live.count(comm) > 0;
}

ncclResult_t check_ready(ncclComm* comm, const char* function) {
    if (auto result = check_live(comm, function)) return result;
    if (comm->revoked) return fail(ncclInvalidUsage, "the communicator has been revoked");
    if (comm->finalized)
        return fail(ncclInvalidArgument, "the communicator has been finalized");
    int async = comm->async;
    if (async == ncclSuccess) return ncclSuccess;
    fail(ncclInvalidArgument,
         "Attempt to use communicator before the previous operation returned ncclSuccess");
    return async == ncclInProgress ? ncclInvalidArgument : static_cast<ncclResult_t>(async);
}

}  // namespace nccl

using nccl::check_live;
using nccl::check_ready;
using nccl::fail;
using nccl::format;
using nccl::group_failed;
using nccl::Lock;

// ---- initialisation -------------------------------------------------------------------------
ncclResult_t ncclGetVersion(int* version) {
    if (!version) return fail(ncclInvalidArgument, "GetVersion : version argument is NULL");
    *version = nccl::version();
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (!id) return fail(ncclInvalidArgument, "GetUniqueId : out argument is NULL");
    return nccl::new_unique_id(id);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    nccl::Settings settings;
    if (!out)
        return group_failed(fail(ncclInvalidArgument, "CommInitRank : comm argument is NULL"));
    *out = nullptr;
    if (auto result = nccl::read_config(config, settings)) return group_failed(result);
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return group_failed(fail(ncclInvalidArgument,
                                 format("Invalid rank requested : %d/%d", rank, ranks)));
    if (!nccl::valid_unique_id(id))
        return group_failed(fail(ncclInvalidArgument, "the unique id is not from ncclGetUniqueId"));
    if (emu_current_device() < 0)
        return group_failed(
            fail(ncclUnhandledCudaError, "Cuda failure 201 'invalid device context'"));
    auto* comm = nccl::new_comm(ranks, rank, settings);
    return nccl::start(comm, out, [comm, id] { return nccl::connect_ranks(comm, id); });
}

ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int ranks, int rank, int id_count,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
    if (id_count < 1 || id_count > ranks || !ids)
        return group_failed(fail(ncclInvalidArgument,
                                 format("improper usage of ncclCommInitRank: nId = %d, nranks=%d",
                                        id_count, ranks)));
    return ncclCommInitRankConfig(out, ranks, ids[0], rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
    int before = emu_current_device();
    ncclUniqueId id;
    nccl::new_unique_id(&id);
    ncclGroupStart();
    for (int rank = 0; rank < count; rank++) {
        emu_use_device(devices ? devices[rank] : rank);
        ncclCommInitRank(&comms[rank], count, id, rank);
    }
    if (before >= 0) emu_use_device(before);
    return ncclGroupEnd();
}

// ---- split and shrink -----------------------------------------------------------------------
namespace {

struct Vote {
    int color, key;
    ncclUniqueId id;
};

}  // namespace

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out,
                           ncclConfig_t* config) {
    if (auto result = check_ready(parent, "CommSplit")) return group_failed(result);
    nccl::Settings settings{parent->blocking};
    if (!out)
        return group_failed(fail(ncclInvalidArgument, "CommSplit : newcomm argument is NULL"));
    if (auto result = nccl::read_config(config, settings)) return group_failed(result);
    if (color < NCCL_SPLIT_NOCOLOR)
        return group_failed(fail(ncclInvalidArgument, format("invalid color %d", color)));
    *out = nullptr;
    // The ranks of the child are known only after the exchange, which runs on the helper thread.
    auto* comm = nccl::new_comm(parent->ranks, parent->rank, settings);
    auto connect = [=, turn = parent->exchanges++]() -> ncclResult_t {
        std::vector<Vote> votes(parent->ranks);
        Vote mine{color, key, {}};
        nccl::new_unique_id(&mine.id);
        auto everyone = nccl::ranks_without(parent->ranks, nullptr, 0);
        auto result = nccl::exchange(parent, turn, everyone, &mine, votes.data(), sizeof mine);
        if (result || color == NCCL_SPLIT_NOCOLOR) return result;
        std::vector<std::pair<int, int>> members;  // key, rank of the parent
        for (int rank = 0; rank < parent->ranks; rank++)
            if (votes[rank].color == color) members.push_back({votes[rank].key, rank});
        std::sort(members.begin(), members.end());
        comm->ranks = static_cast<int>(members.size());
        for (int i = 0; i < comm->ranks; i++)
            if (members[i].second == parent->rank) comm->rank = i;
        return nccl::connect_ranks(comm, votes[members[0].second].id);
    };
    if (color != NCCL_SPLIT_NOCOLOR) return nccl::start(comm, out, connect);
    ncclComm_t none = nullptr;  // this rank votes only; in a group it must not wait for the others
    ncclResult_t result = nccl::start(comm, &none, connect);
    if (result == ncclInProgress && !nccl::in_group()) return ncclSuccess;
    return result;
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int excluded_count, ncclComm_t* out,
                            ncclConfig_t* config, int flags) {
    if (auto result = check_live(parent, "CommShrink")) return group_failed(result);
    nccl::Settings settings{parent->blocking};
    if (!out || !excluded || excluded_count < 1 || excluded_count >= parent->ranks)
        return group_failed(fail(ncclInvalidArgument,
                                 format("CommShrink : invalid arguments, %d of %d ranks excluded",
                                        excluded_count, parent->ranks)));
    if (auto result = nccl::read_config(config, settings)) return group_failed(result);
    *out = nullptr;
    auto members = nccl::ranks_without(parent->ranks, excluded, excluded_count);
    auto place = std::find(members.begin(), members.end(), parent->rank);
    if (place == members.end())
        return group_failed(fail(ncclInvalidUsage, "CommShrink : called by an excluded rank"));
    if (flags & NCCL_SHRINK_ABORT) nccl::stop(parent);
    else if (!parent->revoked)
        if (auto result = check_ready(parent, "CommShrink")) return group_failed(result);
    auto* comm = nccl::new_comm(static_cast<int>(members.size()),
                                static_cast<int>(place - members.begin()), settings);
    return nccl::start(comm, out, [=, turn = parent->exchanges++]() -> ncclResult_t {
        std::vector<Vote> votes(parent->ranks);
        Vote mine{static_cast<int>(members.size()), 0, {}};
        nccl::new_unique_id(&mine.id);
        if (auto r = nccl::exchange(parent, turn, members, &mine, votes.data(), sizeof mine))
            return r;
        return nccl::connect_ranks(comm, votes[members[0]].id);
    });
}

// ---- the end of a communicator --------------------------------------------------------------
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (auto result = check_ready(comm, "CommFinalize")) return result;
    comm->finalized = true;
    if (comm->blocking) {
        nccl::wait_until_idle(comm);
        return ncclSuccess;
    }
    if (comm->helper.joinable()) comm->helper.join();
    comm->async = ncclInProgress;
    comm->helper = std::thread([comm] {
        nccl::wait_until_idle(comm);
        int busy = ncclInProgress;
        comm->async.compare_exchange_strong(busy, ncclSuccess);
    });
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    if (auto result = check_live(comm, "CommDestroy")) return result;
    nccl::close_comm(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    if (auto result = check_live(comm, "CommAbort")) return result;
    comm->aborted = true;
    {
        Lock lock(comm->mutex);
        comm->stopped = true;
        comm->changed.notify_all();
    }
    nccl::close_comm(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
    if (auto result = check_live(comm, "CommRevoke")) return result;
    if (flags != NCCL_REVOKE_DEFAULT)
        return fail(ncclInvalidArgument, format("CommRevoke : invalid flags %d", flags));
    if (comm->finalized) return fail(ncclInvalidUsage, "CommRevoke : after finalize");
    comm->revoked = true;
    nccl::stop(comm);
    comm->async = ncclSuccess;
    return ncclSuccess;
}

// ---- questions ------------------------------------------------------------------------------
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    if (auto result = check_live(comm, "CommGetAsyncError")) return result;
    if (!error) return fail(ncclInvalidArgument, "CommGetAsyncError : asyncError argument is NULL");
    *error = static_cast<ncclResult_t>(comm->async.load());
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t code) {
    switch (code) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError:
            return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        case ncclSystemError:
            return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case ncclInternalError:
            return "internal error - please report this issue to the NCCL developers";
        case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
        case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
        case ncclTimeout: return "NCCL operation timed out";
        default: return "unknown result code";
    }
}

const char* ncclGetLastError(ncclComm_t comm) {
    static thread_local std::string text;
    text = nccl::last_error();
    if (comm && nccl::is_live(comm)) {
        Lock lock(comm->mutex);
        if (!comm->error.empty()) text = comm->error;
    }
    return text.c_str();
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    if (auto result = check_live(comm, "CommCount")) return result;
    *count = comm->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    if (auto result = check_live(comm, "CommCuDevice")) return result;
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    if (auto result = check_live(comm, "CommUserRank")) return result;
    *rank = comm->rank;
    return ncclSuccess;
}

