// Driver entry points for initialisation, devices, contexts, streams, events and host functions.
#include <dlfcn.h>
#include <glob.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_core.h"

namespace {

using emu::Lock;

bool valid_device(CUdevice device) { return device >= 0 && device < emu::device_count(); }

CUcontext handle_of(emu::Context* context) { return static_cast<CUcontext>(context); }

int compute_capability() {
    static const char* text = getenv("EMU_CUDA_CC");
    return text ? atoi(text) : 90;
}

// Loads the host versions of kernels: every *.so of the folders in EMU_KERNELS (colon-separated).
bool load_host_kernels() {
    const char* folders = getenv("EMU_KERNELS");
    std::string rest = folders ? folders : "";
    while (!rest.empty()) {
        size_t colon = rest.find(':');
        std::string folder = rest.substr(0, colon);
        rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
        glob_t found{};
        if (!folder.empty() && glob((folder + "/*.so").c_str(), 0, nullptr, &found) == 0)
            for (size_t i = 0; i < found.gl_pathc; i++)
                if (!dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL)) {
                    fprintf(stderr, "[emucuda] host kernels: %s\n", dlerror());
                    return false;
                }
        globfree(&found);
    }
    return true;
}

CUresult sticky_error() {
    auto* context = emu::current_context();
    return static_cast<CUresult>(context ? context->sticky.load() : 0);
}

}  // namespace

extern "C" {

// ---- initialisation, devices ----------------------------------------------------------------
CUresult cuInit(unsigned) {
    EMU_TRACE_CALL();
    CUresult result = emu::initialise();
    if (result) return result;
    static const bool loaded = load_host_kernels();
    return loaded ? CUDA_SUCCESS : CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
}

CUresult cuDriverGetVersion(int* version) {
    EMU_TRACE_CALL();
    const char* text = getenv("EMU_CUDA_VERSION");
    *version = text ? atoi(text) : 12090;
    return CUDA_SUCCESS;
}

// NVRTC dlopens libcuda.so.1 and calls this without checking that dlsym found it: absent, it
// crashes. An error is enough.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
    EMU_TRACE_CALL();
    if (table) *table = nullptr;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDeviceGetCount(int* count) {
    EMU_NEEDS_INIT();
    *count = emu::device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    EMU_NEEDS_INIT();
    if (!valid_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, static_cast<size_t>(size), "Emulated GPU");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = 0x0e;
    uuid->bytes[15] = static_cast<char>(emu::context_of(device)->physical);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
    EMU_NEEDS_INIT();
    *bytes = size_t{1} << 32;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0",
             emu::context_of(device)->physical + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            *value = compute_capability() / 10;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
            *value = compute_capability() % 10;
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: *value = 65535; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 * 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 * 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 * 1024; break;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = emu::context_of(device)->physical + 1; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: *value = 1; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// ---- contexts -------------------------------------------------------------------------------
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Lock lock(emu::global_mutex);
    emu::context_of(device)->references++;
    *context = handle_of(emu::context_of(device));
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Lock lock(emu::global_mutex);
    if (emu::context_of(device)->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    emu::context_of(device)->references--;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    EMU_NEEDS_INIT();
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = emu::context_of(device)->flags;
    *active = emu::context_of(device)->references > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    EMU_NEEDS_INIT();
    auto& stack = emu::context_stack();
    if (stack.empty()) stack.push_back(context);
    else stack.back() = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    EMU_NEEDS_INIT();
    *context = handle_of(emu::current_context());
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    EMU_NEEDS_INIT();
    emu::context_stack().push_back(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    EMU_NEEDS_INIT();
    auto& stack = emu::context_stack();
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = handle_of(stack.back());
    stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    EMU_NEEDS_CONTEXT();
    *device = emu::current_context()->device;
    return CUDA_SUCCESS;
}

CUresult emu_cuCtxGetDevice_v2(CUdevice* device, CUcontext context) {
    EMU_NEEDS_INIT();
    emu::Context* wanted = context ? context : emu::current_context();
    if (!wanted) return CUDA_ERROR_INVALID_CONTEXT;
    *device = wanted->device;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
    EMU_NEEDS_INIT();
    emu::Context* wanted = context ? context : emu::current_context();
    if (!wanted) return CUDA_ERROR_INVALID_CONTEXT;
    *id = static_cast<unsigned long long>(wanted->device) + 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    EMU_NEEDS_CONTEXT();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult emu_cuCtxSynchronize_v2(CUcontext context) {
    EMU_NEEDS_CONTEXT();
    // A host function may not call CUDA; here it would wait for itself.
    if (emu::running_record()) return CUDA_ERROR_NOT_PERMITTED;
    Lock lock(emu::global_mutex);
    emu::wait_for_context(lock, context ? context : emu::current_context());
    return sticky_error();
}

CUresult cuCtxSynchronize() { return emu_cuCtxSynchronize_v2(nullptr); }

// ---- streams --------------------------------------------------------------------------------
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
    EMU_NEEDS_CONTEXT();
    if (!stream || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    Lock lock(emu::global_mutex);
    int clamped = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    *stream = emu::new_stream(emu::current_context(), flags, clamped);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult cuStreamDestroy(CUstream handle) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    stream->closing = true;  // its worker finishes the queue first
    stream->wake.notify_one();
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    EMU_NEEDS_CONTEXT();
    if (emu::running_record()) return CUDA_ERROR_NOT_PERMITTED;
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    emu::wait_for(lock, stream->last);
    return sticky_error();
}

CUresult cuStreamQuery(CUstream handle) {
    EMU_NEEDS_CONTEXT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    if (stream->last && !stream->last->done) return CUDA_ERROR_NOT_READY;
    if (stream->last) emu::join(emu::host_clock, stream->last->clock);
    return sticky_error();
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    *context = handle_of(stream->context);
    return CUDA_SUCCESS;
}

CUresult emu_cuStreamGetCtx_v2(CUstream handle, CUcontext* context, CUgreenCtx* green) {
    if (green) *green = nullptr;
    return cuStreamGetCtx(handle, context);
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* device) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    *device = stream->context->device;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    *id = stream->index;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
    EMU_NEEDS_INIT();
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

// ---- events ---------------------------------------------------------------------------------
CUresult cuEventCreate(CUevent* event, unsigned flags) {
    EMU_NEEDS_CONTEXT();
    *event = new CUevent_st{flags, nullptr};
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    EMU_NEEDS_INIT();
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    Lock lock(emu::global_mutex);
    delete event;  // whoever waits for it holds its record
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
    EMU_NEEDS_CONTEXT();
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (emu::noop_mode) return CUDA_SUCCESS;
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    event->record = emu::enqueue(stream, {"eventRecord", nullptr, nullptr, {}});
    return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
    return cuEventRecord(event, stream);
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
    EMU_NEEDS_CONTEXT();
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (emu::noop_mode) return CUDA_SUCCESS;
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    if (event->record) emu::enqueue(stream, {"waitEvent", nullptr, event->record, {}});
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    EMU_NEEDS_INIT();
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    Lock lock(emu::global_mutex);
    if (event->record && !event->record->done) return CUDA_ERROR_NOT_READY;
    if (event->record) emu::join(emu::host_clock, event->record->clock);
    return sticky_error();
}

CUresult cuEventSynchronize(CUevent event) {
    EMU_NEEDS_INIT();
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (emu::running_record()) return CUDA_ERROR_NOT_PERMITTED;
    Lock lock(emu::global_mutex);
    emu::wait_for(lock, event->record);
    return sticky_error();
}

CUresult cuEventElapsedTime(float* ms, CUevent start, CUevent end) {
    EMU_NEEDS_INIT();
    if (!start || !end) return CUDA_ERROR_INVALID_HANDLE;
    Lock lock(emu::global_mutex);
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !start->record || !end->record)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!start->record->done || !end->record->done) return CUDA_ERROR_NOT_READY;
    auto elapsed = end->record->finished - start->record->finished;
    *ms = std::chrono::duration<float, std::milli>(elapsed).count();
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn fn, void* user) {
    EMU_NEEDS_CONTEXT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    emu::enqueue(stream, {"hostFunc", [=] { fn(user); }, nullptr, {}});
    return CUDA_SUCCESS;
}

}  // extern "C"
