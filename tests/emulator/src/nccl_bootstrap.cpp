// How ranks find each other: each listens on an abstract unix socket named after the unique id, so
// nothing is left in the file system. Two connections for each pair: data, and control.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>

#include "nccl_core.h"

namespace nccl {
namespace {

using Time = std::chrono::steady_clock;

constexpr char id_magic[8] = "EMUNCCL";
constexpr size_t token_bytes = 16;
constexpr int poll_ms = 20;  // how soon a wait notices an abort

struct Hello {
    uint32_t magic = 0xE3C0E3C0;
    int32_t rank = 0, ranks = 0, physical = 0, channel = 0;
};

Time::time_point init_deadline() {
    const char* text = getenv("EMU_NCCL_INIT_TIMEOUT");
    double seconds = text ? atof(text) : 120;
    return Time::now() + std::chrono::milliseconds(static_cast<long>(seconds * 1000));
}

socklen_t make_address(sockaddr_un& address, const ncclUniqueId& id, int rank) {
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    std::string name = "emunccl-" + std::string(id.internal + sizeof id_magic, token_bytes) + "-" +
                       std::to_string(rank);
    memcpy(address.sun_path + 1, name.data(), name.size());  // a leading 0: the abstract namespace
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Moves exactly `bytes`, or gives up at an abort, at the deadline, or when the peer is gone.
ncclResult_t transfer(ncclComm* comm, int fd, void* data, size_t bytes, bool sending,
                      Time::time_point deadline) {
    auto* at = static_cast<char*>(data);
    while (bytes) {
        if (comm->aborted) return fail(ncclInternalError, "aborted");
        if (Time::now() > deadline) return fail(ncclSystemError, "timed out waiting for a rank");
        pollfd poller{fd, static_cast<short>(sending ? POLLOUT : POLLIN), 0};
        if (poll(&poller, 1, poll_ms) <= 0) continue;
        ssize_t moved = sending ? send(fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                : recv(fd, at, bytes, MSG_DONTWAIT);
        if (moved < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (moved <= 0) return fail(ncclRemoteError, "a rank is gone");
        at += moved;
        bytes -= static_cast<size_t>(moved);
    }
    return ncclSuccess;
}

struct Listener {
    int fd = -1;
    ~Listener() {
        if (fd >= 0) close(fd);
    }
};

ncclResult_t connect_to(ncclComm* comm, const ncclUniqueId& id, int peer, int channel,
                        Time::time_point deadline) {
    sockaddr_un address;
    socklen_t length = make_address(address, id, peer);
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) return fail(ncclSystemError, "socket: " + std::string(strerror(errno)));
        if (connect(fd, reinterpret_cast<sockaddr*>(&address), length) == 0) {
            (channel ? comm->control : comm->data)[peer] = fd;
            Hello hello;
            hello.rank = comm->rank;
            hello.ranks = comm->ranks;
            hello.physical = comm->physical;
            hello.channel = channel;
            return transfer(comm, fd, &hello, sizeof hello, true, deadline);
        }
        close(fd);
        if (comm->aborted) return fail(ncclInternalError, "aborted");
        if (Time::now() > deadline)
            return fail(ncclSystemError, "timed out waiting for rank " + std::to_string(peer));
        usleep(500);
    }
}

ncclResult_t accept_one(ncclComm* comm, int listener, Time::time_point deadline) {
    pollfd poller{listener, POLLIN, 0};
    while (poll(&poller, 1, poll_ms) <= 0) {
        if (comm->aborted) return fail(ncclInternalError, "aborted");
        if (Time::now() > deadline) return fail(ncclSystemError, "timed out waiting for a rank");
    }
    int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return fail(ncclSystemError, "accept: " + std::string(strerror(errno)));
    Hello hello, good;
    ncclResult_t result = transfer(comm, fd, &hello, sizeof hello, false, deadline);
    bool valid = !result && hello.magic == good.magic && hello.rank > comm->rank &&
                 hello.rank < hello.ranks && hello.ranks == comm->ranks;
    auto* slot = valid ? &(hello.channel ? comm->control : comm->data)[hello.rank] : nullptr;
    if (!slot || *slot >= 0) {
        close(fd);
        if (result) return result;
        return fail(ncclInternalError, format("mismatch in rank count from procs %d : %d",
                                              comm->ranks, hello.ranks));
    }
    *slot = fd;
    return ncclSuccess;
}

ncclResult_t check_devices(ncclComm* comm) {
    std::vector<int> all(comm->ranks), members;
    for (int rank = 0; rank < comm->ranks; rank++) members.push_back(rank);
    unsigned turn = comm->exchanges++;
    ncclResult_t result =
        exchange(comm, turn, members, &comm->physical, all.data(), sizeof(int));
    if (result) return result;
    const char* enabled = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (version() >= 23000 && enabled && strcmp(enabled, "1") == 0) return ncclSuccess;
    for (int a = 0; a < comm->ranks; a++)
        for (int b = a + 1; b < comm->ranks; b++) {
            if (all[a] != all[b]) continue;
            if (version() >= 23000)
                return fail(ncclInvalidUsage,
                            "Multiple Ranks are using the same GPU/Partition. Set "
                            "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.");
            return fail(ncclInvalidUsage,
                        format("Duplicate GPU detected : rank %d and rank %d both on CUDA device "
                               "%x", a, b, (all[a] + 1) << 12));
        }
    return ncclSuccess;
}

}  // namespace

ncclResult_t new_unique_id(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    memcpy(id->internal, id_magic, sizeof id_magic);
    std::random_device random;
    std::string token = format("%08x%08x", random(), random());
    memcpy(id->internal + sizeof id_magic, token.data(), token_bytes);
    return ncclSuccess;
}

bool valid_unique_id(const ncclUniqueId& id) {
    return memcmp(id.internal, id_magic, sizeof id_magic) == 0;
}

ncclResult_t connect_ranks(ncclComm* comm, const ncclUniqueId& id) {
    auto deadline = init_deadline();
    comm->data.assign(comm->ranks, -1);
    comm->control.assign(comm->ranks, -1);
    Listener listener{socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_un address;
    socklen_t length = make_address(address, id, comm->rank);
    if (bind(listener.fd, reinterpret_cast<sockaddr*>(&address), length) ||
        listen(listener.fd, 2 * comm->ranks))
        return fail(ncclInternalError, format("rank %d of %d ranks has already checked in",
                                              comm->rank, comm->ranks));
    for (int peer = 0; peer < comm->rank; peer++)
        for (int channel = 0; channel < 2; channel++)
            if (auto result = connect_to(comm, id, peer, channel, deadline)) return result;
    for (int left = 2 * (comm->ranks - 1 - comm->rank); left > 0; left--)
        if (auto result = accept_one(comm, listener.fd, deadline)) return result;
    for (int fd : comm->data) {
        int bytes = 1 << 20;
        if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    }
    return check_devices(comm);  // also a barrier: every rank is connected to every other
}

static ncclResult_t exchange_now(ncclComm* comm, const std::vector<int>& members, const void* mine,
                                 void* all, size_t bytes) {
    auto deadline = init_deadline();
    auto* slots = static_cast<char*>(all);
    memcpy(slots + comm->rank * bytes, mine, bytes);
    for (bool sending : {true, false})
        for (int peer : members) {
            if (peer == comm->rank) continue;
            char* data = slots + (sending ? comm->rank : peer) * bytes;
            if (auto r = transfer(comm, comm->control[peer], data, bytes, sending, deadline))
                return r;
        }
    return ncclSuccess;
}

ncclResult_t exchange(ncclComm* comm, unsigned turn, const std::vector<int>& members,
                      const void* mine, void* all, size_t bytes) {
    Lock lock(comm->control_mutex);
    comm->control_changed.wait(lock, [&] { return comm->exchanged == turn; });
    auto result = exchange_now(comm, members, mine, all, bytes);
    comm->exchanged++;
    comm->control_changed.notify_all();
    return result;
}

}  // namespace nccl
