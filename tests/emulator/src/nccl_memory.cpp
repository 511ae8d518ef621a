// Memory, registration, symmetric windows and user-made reductions.
#include <cstring>

#include "nccl_core.h"

extern "C" {
int cuMemAlloc_v2(void** pointer, size_t bytes);
int cuMemFree_v2(void* pointer);
}

using nccl::check_ready;
using nccl::fail;
using nccl::format;
using nccl::Lock;

ncclResult_t ncclMemAlloc(void** out, size_t bytes) {
    if (!out || !bytes) return fail(ncclInvalidArgument, "MemAlloc : invalid argument");
    int error = cuMemAlloc_v2(out, bytes);
    return error ? fail(ncclUnhandledCudaError, format("Cuda failure %d", error)) : ncclSuccess;
}

ncclResult_t ncclMemFree(void* pointer) {
    int error = cuMemFree_v2(pointer);
    return error ? fail(ncclUnhandledCudaError, format("Cuda failure %d", error)) : ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t bytes, void** handle) {
    if (auto result = check_ready(comm, "CommRegister")) return result;
    if (!buffer || !bytes || !handle)
        return fail(ncclInvalidArgument, "CommRegister : invalid argument");
    if (emu_check_range(buffer, bytes, "ncclCommRegister"))
        return fail(ncclInvalidArgument, "CommRegister : the buffer is too small");
    Lock lock(comm->mutex);
    *handle = new char;  // an address that no other handle has
    comm->registered[*handle] = bytes;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
    if (auto result = check_ready(comm, "CommDeregister")) return result;
    Lock lock(comm->mutex);
    if (!comm->registered.erase(handle))
        return fail(ncclInvalidUsage, "CommDeregister : not a handle of this communicator");
    return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t bytes,
                                    ncclWindow_t* window, int) {
    if (auto result = check_ready(comm, "CommWindowRegister")) return nccl::group_failed(result);
    if (!buffer || !bytes || !window)
        return nccl::group_failed(
            fail(ncclInvalidArgument, "CommWindowRegister : invalid argument"));
    if (reinterpret_cast<uintptr_t>(buffer) % NCCL_WIN_REQUIRED_ALIGNMENT)
        return nccl::group_failed(
            fail(ncclInvalidArgument, format("CommWindowRegister : the buffer is not aligned to %d "
                                             "bytes", NCCL_WIN_REQUIRED_ALIGNMENT)));
    if (emu_check_range(buffer, bytes, "ncclCommWindowRegister"))
        return nccl::group_failed(fail(ncclInvalidArgument, "CommWindowRegister : too small"));
    Lock lock(comm->mutex);
    *window = reinterpret_cast<ncclWindow_t>(new char);
    comm->windows[*window] = buffer;
    return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    if (auto result = check_ready(comm, "CommWindowDeregister")) return nccl::group_failed(result);
    Lock lock(comm->mutex);
    if (!comm->windows.erase(window))
        return nccl::group_failed(
            fail(ncclInvalidUsage, "CommWindowDeregister : not a window of this communicator"));
    return ncclSuccess;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** out) {
    if (auto result = check_ready(comm, "WinGetUserPtr")) return result;
    Lock lock(comm->mutex);
    auto it = comm->windows.find(window);
    if (it == comm->windows.end() || !out)
        return fail(ncclInvalidArgument, "WinGetUserPtr : not a window of this communicator");
    *out = it->second;
    return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
    if (auto result = check_ready(comm, "RedOpCreatePreMulSum")) return result;
    if (!op || !scalar || type < 0 || type >= ncclNumTypes)
        return fail(ncclInvalidArgument, "RedOpCreatePreMulSum : invalid argument");
    nccl::Reduction reduction;
    reduction.op = ncclNumOps;
    if (residence == ncclScalarHostImmediate) memcpy(reduction.scalar, scalar, nccl::size_of(type));
    else reduction.device_scalar = scalar;
    Lock lock(comm->mutex);
    int id = comm->next_user_op++;
    comm->user_ops[id] = reduction;
    comm->user_op_types[id] = type;
    *op = static_cast<ncclRedOp_t>(id);
    return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    if (auto result = check_ready(comm, "RedOpDestroy")) return result;
    if (op < ncclNumOps)
        return fail(ncclInvalidArgument,
                    format("ncclRedOpDestroy : operator %d is a NCCL builtin.", op));
    Lock lock(comm->mutex);
    if (!comm->user_ops.erase(op))
        return fail(ncclInvalidArgument,
                    format("ncclRedOpDestroy : operator %d unknown to this communicator", op));
    comm->user_op_types.erase(op);
    return ncclSuccess;
}
