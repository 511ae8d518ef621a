// cuGetProcAddress, error names, and stubs that record what is not emulated.
//
// The table is keyed by name and version: for one name there may be two functions with different
// signatures (cuStreamGetCtx of 9.2 and of 12.5), and the caller says which one it was built for.
#define CUDA_ENABLE_DEPRECATED
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "cuda_core.h"

extern "C" {
CUresult emu_cuCtxGetDevice_v2(CUdevice*, CUcontext);
CUresult emu_cuCtxSynchronize_v2(CUcontext);
CUresult emu_cuStreamGetCtx_v2(CUstream, CUcontext*, CUgreenCtx*);
}

namespace {

struct Error {
    CUresult code;
    const char* name;
    const char* text;
};
#define EMU_ERROR(code, text) {code, #code, text}
const Error errors[] = {
    EMU_ERROR(CUDA_SUCCESS, "no error"),
    EMU_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    EMU_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    EMU_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    EMU_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    EMU_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    EMU_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    EMU_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    EMU_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    EMU_ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU,
              "no kernel image is available for execution on the device"),
    EMU_ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    EMU_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    EMU_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    EMU_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    EMU_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    EMU_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    EMU_ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    EMU_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    EMU_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    EMU_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    EMU_ERROR(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
              "system has unsupported display driver / cuda driver combination"),
    EMU_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

// ---- recording stubs ------------------------------------------------------------------------
// One function for each unknown name, so that a call can say which name it was. 1,024 are plenty:
// cuda.bindings 13.4 asks for 524 (name, version) pairs in all.
constexpr int stub_count = 1024;
std::string* stub_names[stub_count];
int stubs_used = 0;

template <int index>
CUresult stub() {
    return emu::not_emulated(stub_names[index]->c_str());
}

template <int... index>
void* const* make_stubs(std::integer_sequence<int, index...>) {
    static void* const table[] = {reinterpret_cast<void*>(&stub<index>)...};
    return table;
}

void* stub_for(const std::string& name) {
    static void* const* stubs = make_stubs(std::make_integer_sequence<int, stub_count>());
    static std::mutex& mutex = emu::leaked<std::mutex>();
    static auto& indices = emu::leaked<std::unordered_map<std::string, int>>();
    emu::Lock lock(mutex);
    auto [it, added] = indices.emplace(name, stubs_used);
    if (added) {
        if (stubs_used == stub_count) return nullptr;
        stub_names[stubs_used++] = new std::string(name);
    }
    return stubs[it->second];
}

// ---- the table ------------------------------------------------------------------------------
struct Entry {
    int since;  // the lowest version to ask for that gives this function
    void* function;
};
using Table = std::unordered_map<std::string, std::vector<Entry>>;

// `cuda.h` maps some names to versioned ones (cuMemAlloc -> cuMemAlloc_v2): in the text of the
// macro argument the plain name is kept, in its value the mapped one. The plain names of functions
// that changed in 3.2 and 4.0 mean another signature below that version.
#define EMU_SINCE(name, since) {#name, {{since, reinterpret_cast<void*>(&name)}}}
#define EMU_ANY(name) {#name, {{0, reinterpret_cast<void*>(&name)}}}

const Table& table() {
    static const Table& entries = *new Table{
        EMU_ANY(cuInit), EMU_ANY(cuDriverGetVersion), EMU_ANY(cuGetExportTable),
        EMU_ANY(cuGetErrorName), EMU_ANY(cuGetErrorString),
        EMU_ANY(cuDeviceGetCount), EMU_ANY(cuDeviceGet), EMU_ANY(cuDeviceGetName),
        EMU_ANY(cuDeviceGetUuid), EMU_SINCE(cuDeviceTotalMem, 3020),
        EMU_ANY(cuDeviceGetPCIBusId), EMU_ANY(cuDeviceGetAttribute),
        EMU_ANY(cuDevicePrimaryCtxRetain), EMU_ANY(cuDevicePrimaryCtxRelease),
        EMU_ANY(cuDevicePrimaryCtxGetState), EMU_ANY(cuCtxSetCurrent), EMU_ANY(cuCtxGetCurrent),
        EMU_SINCE(cuCtxPushCurrent, 4000), EMU_SINCE(cuCtxPopCurrent, 4000), EMU_ANY(cuCtxGetId),
        EMU_ANY(cuCtxGetStreamPriorityRange),
        {"cuCtxGetDevice", {{0, reinterpret_cast<void*>(&cuCtxGetDevice)},
                            {13000, reinterpret_cast<void*>(&emu_cuCtxGetDevice_v2)}}},
        {"cuCtxSynchronize", {{0, reinterpret_cast<void*>(&cuCtxSynchronize)},
                              {13000, reinterpret_cast<void*>(&emu_cuCtxSynchronize_v2)}}},
        EMU_ANY(cuStreamCreate), EMU_ANY(cuStreamCreateWithPriority),
        EMU_SINCE(cuStreamDestroy, 4000), EMU_ANY(cuStreamSynchronize), EMU_ANY(cuStreamQuery),
        {"cuStreamGetCtx", {{0, reinterpret_cast<void*>(&cuStreamGetCtx)},
                            {12050, reinterpret_cast<void*>(&emu_cuStreamGetCtx_v2)}}},
        EMU_ANY(cuStreamGetDevice), EMU_ANY(cuStreamGetFlags), EMU_ANY(cuStreamGetPriority),
        EMU_ANY(cuStreamGetId), EMU_ANY(cuStreamIsCapturing), EMU_ANY(cuStreamWaitEvent),
        EMU_ANY(cuEventCreate), EMU_SINCE(cuEventDestroy, 4000), EMU_ANY(cuEventRecord),
        EMU_ANY(cuEventRecordWithFlags), EMU_ANY(cuEventQuery), EMU_ANY(cuEventSynchronize),
        EMU_ANY(cuEventElapsedTime),
        {"cuLaunchHostFunc", {{0, reinterpret_cast<void*>(&cuLaunchHostFunc)},
                              {13020, nullptr}}},
        EMU_SINCE(cuMemAlloc, 3020), EMU_SINCE(cuMemAllocHost, 3020), EMU_ANY(cuMemHostAlloc),
        EMU_ANY(cuMemAllocManaged), EMU_SINCE(cuMemHostGetDevicePointer, 3020),
        EMU_SINCE(cuMemFree, 3020), EMU_ANY(cuMemFreeHost), EMU_ANY(cuMemAllocAsync),
        EMU_ANY(cuMemAllocFromPoolAsync), EMU_ANY(cuMemFreeAsync), EMU_ANY(cuDeviceGetMemPool),
        EMU_ANY(cuDeviceGetDefaultMemPool), EMU_ANY(cuMemPoolGetAttribute),
        EMU_ANY(cuMemPoolSetAttribute), EMU_SINCE(cuMemGetInfo, 3020),
        EMU_ANY(cuMemcpy), EMU_ANY(cuMemcpyAsync), EMU_SINCE(cuMemcpyHtoD, 3020),
        EMU_SINCE(cuMemcpyDtoH, 3020), EMU_SINCE(cuMemcpyDtoD, 3020),
        EMU_SINCE(cuMemcpyHtoDAsync, 3020), EMU_SINCE(cuMemcpyDtoHAsync, 3020),
        EMU_SINCE(cuMemcpyDtoDAsync, 3020), EMU_SINCE(cuMemsetD8, 3020),
        EMU_SINCE(cuMemsetD16, 3020), EMU_SINCE(cuMemsetD32, 3020), EMU_ANY(cuMemsetD8Async),
        EMU_ANY(cuMemsetD16Async), EMU_ANY(cuMemsetD32Async), EMU_ANY(cuPointerGetAttribute),
        EMU_ANY(cuPointerGetAttributes), EMU_SINCE(cuMemGetAddressRange, 3020),
        EMU_ANY(cuLibraryLoadData), EMU_ANY(cuLibraryUnload), EMU_ANY(cuLibraryGetKernel),
        EMU_ANY(cuLibraryGetKernelCount), EMU_ANY(cuLibraryGetModule),
        EMU_ANY(cuModuleLoadData), EMU_ANY(cuModuleLoadDataEx), EMU_ANY(cuModuleUnload),
        EMU_ANY(cuModuleGetFunction), EMU_ANY(cuKernelGetFunction), EMU_ANY(cuKernelGetLibrary),
        EMU_ANY(cuKernelGetName), EMU_ANY(cuKernelGetParamInfo), EMU_ANY(cuKernelGetAttribute),
        EMU_ANY(cuKernelSetAttribute), EMU_ANY(cuFuncGetAttribute), EMU_ANY(cuFuncSetAttribute),
        EMU_ANY(cuOccupancyMaxActiveBlocksPerMultiprocessor),
        EMU_ANY(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags),
        EMU_ANY(cuOccupancyMaxPotentialBlockSize), EMU_ANY(cuLaunchKernel),
        EMU_ANY(cuLaunchKernelEx),
    };
    return entries;
}

// The signature of CUDA 11.
CUresult get_proc_address_of_cuda_11(const char* name, void** function, int version,
                                     cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

}  // namespace

CUresult emu::not_emulated(const char* what) {
    fprintf(stderr, "[emucuda] NOT EMULATED: %s\n", what);
    emu_report("unknown", what);
    return CUDA_ERROR_NOT_SUPPORTED;
}

extern "C" {

CUresult cuGetErrorName(CUresult code, const char** name) {
    for (const Error& error : errors)
        if (error.code == code) return *name = error.name, CUDA_SUCCESS;
    *name = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    for (const Error& error : errors)
        if (error.code == code) return *text = error.text, CUDA_SUCCESS;
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
    static const bool trace = getenv("EMU_TRACE_PROC") != nullptr;
    if (trace) fprintf(stderr, "[emucuda] proc %s %d\n", name, version);
    if (!name || !function) return CUDA_ERROR_INVALID_VALUE;
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    *function = nullptr;
    if (strcmp(name, "cuGetProcAddress") == 0) {
        *function = version >= 12000 ? reinterpret_cast<void*>(&cuGetProcAddress_v2)
                                     : reinterpret_cast<void*>(&get_proc_address_of_cuda_11);
        return CUDA_SUCCESS;
    }
    auto it = table().find(name);
    if (it != table().end())
        for (const Entry& entry : it->second)
            if (version >= entry.since) *function = entry.function;
    if (!*function)
        *function = stub_for(std::string(name) + " (version " + std::to_string(version) + ")");
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// For callers that look the plain name up by dlsym.
#undef cuGetProcAddress
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
    return get_proc_address_of_cuda_11(name, function, version, flags);
}

}  // extern "C"
