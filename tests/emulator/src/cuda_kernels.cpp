// Driver entry points for libraries, modules, kernels and launches.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_core.h"

namespace {

constexpr size_t default_shared = 48 * 1024, most_shared = 227 * 1024;

std::map<std::string, emu::KernelDef*>& registry() {
    // A function-local: kernels register from static constructors of other shared objects.
    static auto& kernels = emu::leaked<std::map<std::string, emu::KernelDef*>>();
    return kernels;
}

struct LoadedKernel {
    emu::KernelDef* host = nullptr;  // nullptr: nobody built a host version
    emu::ImageKernel image;
    std::string name;
    void* library = nullptr;
    size_t max_dynamic_shared = default_shared;
};

struct Library {
    std::map<std::string, LoadedKernel> kernels;
};

int device_architecture() {
    int major = 0, minor = 0;
    cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0);
    cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0);
    return major * 10 + minor;
}

// A cubin runs on devices of its own major version with the same or a newer minor one.
bool runs_here(int architecture) {
    int device = device_architecture();
    return architecture == 0 ||
           (architecture / 10 == device / 10 && architecture % 10 <= device % 10);
}

std::string sizes_text(const std::vector<size_t>& sizes) {
    std::string text;
    for (size_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + ")";
}

CUresult load_image(Library** out, const void* data) {
    if (!out || !data) return CUDA_ERROR_INVALID_VALUE;
    emu::Image image;
    if (!emu::parse_image(data, image)) return CUDA_ERROR_INVALID_IMAGE;
    if (!runs_here(image.architecture)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    auto library = std::make_unique<Library>();
    for (const auto& [name, kernel] : image.kernels) {
        emu::KernelDef* host = emu::find_kernel_def(name);
        // The image was compiled from another source than the host version was.
        if (host && host->sizes != kernel.sizes) {
            emu_report("kernel", ("'" + name + "': parameter sizes are " +
                                  sizes_text(kernel.sizes) + " in the image and " +
                                  sizes_text(host->sizes) + " in the host version").c_str());
            return CUDA_ERROR_INVALID_IMAGE;
        }
        library->kernels[name] = {host, kernel, name, library.get(), default_shared};
    }
    *out = library.release();  // kept for ever: launches in flight may refer to it
    return CUDA_SUCCESS;
}

CUresult find_kernel(Library* library, const char* name, LoadedKernel** out) {
    if (!library || !name) return CUDA_ERROR_INVALID_VALUE;
    auto it = library->kernels.find(name);
    if (it == library->kernels.end()) return CUDA_ERROR_NOT_FOUND;
    if (!it->second.host) {
        std::string text = std::string("kernel '") + name + "': no host version (EMU_KERNELS)";
        return emu::not_emulated(text.c_str());
    }
    *out = &it->second;
    return CUDA_SUCCESS;
}

LoadedKernel* kernel_of(const void* handle) {
    return static_cast<LoadedKernel*>(const_cast<void*>(handle));
}

}  // namespace

emu::KernelDef* emu::find_kernel_def(const std::string& name) {
    auto it = registry().find(name);
    return it == registry().end() ? nullptr : it->second;
}

void emu_register_kernel(const EmuKernelEntry* entry) {
    auto* kernel = new emu::KernelDef;
    kernel->name = entry->name;
    kernel->run_thread = entry->run_thread;
    kernel->sizes.assign(entry->param_sizes, entry->param_sizes + entry->param_count);
    kernel->shared_begin = entry->shared_begin;
    kernel->shared_end = entry->shared_end;
    if (!registry().emplace(kernel->name, kernel).second)
        emu_report("kernel", ("'" + kernel->name + "': two host versions").c_str());
}

extern "C" {

// ---- libraries and modules ------------------------------------------------------------------
CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
    EMU_NEEDS_INIT();
    return load_image(reinterpret_cast<Library**>(library), code);
}

CUresult cuLibraryUnload(CUlibrary) {
    EMU_NEEDS_INIT();
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    EMU_NEEDS_INIT();
    return find_kernel(reinterpret_cast<Library*>(library), name,
                       reinterpret_cast<LoadedKernel**>(kernel));
}

CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
    EMU_NEEDS_INIT();
    *count = static_cast<unsigned>(reinterpret_cast<Library*>(library)->kernels.size());
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
    EMU_NEEDS_INIT();
    *module = reinterpret_cast<CUmodule>(library);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    EMU_NEEDS_CONTEXT();
    return load_image(reinterpret_cast<Library**>(module), image);
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleUnload(CUmodule) {
    EMU_NEEDS_INIT();
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    EMU_NEEDS_CONTEXT();
    return find_kernel(reinterpret_cast<Library*>(module), name,
                       reinterpret_cast<LoadedKernel**>(function));
}

// ---- kernels --------------------------------------------------------------------------------
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    EMU_NEEDS_INIT();
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
    EMU_NEEDS_INIT();
    *library = static_cast<CUlibrary>(kernel_of(kernel)->library);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char** name, CUkernel kernel) {
    EMU_NEEDS_INIT();
    *name = kernel_of(kernel)->name.c_str();
    return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* size) {
    EMU_NEEDS_INIT();
    LoadedKernel* kernel = kernel_of(handle);
    const auto& sizes = kernel->host->sizes;
    if (index >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
    size_t computed = 0;  // PTX does not state offsets: the natural layout
    for (size_t i = 0; i <= index; i++) {
        size_t align = sizes[i] > 8 ? 8 : sizes[i];
        computed = (computed + align - 1) / align * align;
        if (i < index) computed += sizes[i];
    }
    *offset = index < kernel->image.offsets.size() ? kernel->image.offsets[index] : computed;
    if (size) *size = sizes[index];
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle,
                              CUdevice) {
    EMU_NEEDS_INIT();
    LoadedKernel* kernel = kernel_of(handle);
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *value = static_cast<int>(kernel->image.max_threads);
            break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
            *value = static_cast<int>(kernel->image.static_shared);
            break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            *value = static_cast<int>(kernel->max_dynamic_shared);
            break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = device_architecture(); break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle,
                              CUdevice) {
    EMU_NEEDS_INIT();
    LoadedKernel* kernel = kernel_of(handle);
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || static_cast<size_t>(value) + kernel->image.static_shared > most_shared)
            return CUDA_ERROR_INVALID_VALUE;
        kernel->max_dynamic_shared = static_cast<size_t>(value);
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    return cuKernelGetAttribute(value, attribute, reinterpret_cast<CUkernel>(function), 0);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    return cuKernelSetAttribute(attribute, value, reinterpret_cast<CUkernel>(function), 0);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int block_size,
                                                     size_t) {
    EMU_NEEDS_INIT();
    if (block_size <= 0) return CUDA_ERROR_INVALID_VALUE;
    *blocks = 2048 / block_size;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function,
                                                              int block_size, size_t shared,
                                                              unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}

CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction function,
                                          CUoccupancyB2DSize, size_t, int limit) {
    EMU_NEEDS_INIT();
    int most = static_cast<int>(kernel_of(function)->image.max_threads);
    *block = limit > 0 && limit < most ? limit : most;
    *grid = 4 * (2048 / *block);
    return CUDA_SUCCESS;
}

// ---- launches -------------------------------------------------------------------------------
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream handle, void** params, void** extra) {
    EMU_NEEDS_CONTEXT();
    LoadedKernel* kernel = kernel_of(function);
    if (!kernel || !kernel->host) return CUDA_ERROR_INVALID_HANDLE;
    size_t threads = size_t{block_x} * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > kernel->image.max_threads ||
        grid_x > 0x7fffffffu || grid_y > 65535 || grid_z > 65535 || block_z > 64 ||
        shared + kernel->image.static_shared > kernel->max_dynamic_shared)
        return CUDA_ERROR_INVALID_VALUE;
    if (extra) return emu::not_emulated("cuLaunchKernel with 'extra'");

    struct Call {  // arguments are copied now: the caller may reuse its memory at once
        std::vector<char> bytes;
        std::vector<void*> params;
        emu::Launch launch;
    };
    auto call = std::make_shared<Call>();
    const auto& sizes = kernel->host->sizes;
    if (!params && !sizes.empty()) return CUDA_ERROR_INVALID_VALUE;
    auto slot = [](size_t size) { return (size + 15) / 16 * 16; };
    size_t total = 0;
    for (size_t size : sizes) total += slot(size);
    call->bytes.resize(total);
    char* at = call->bytes.data();
    for (size_t i = 0; i < sizes.size(); i++) {
        memcpy(at, params[i], sizes[i]);
        call->params.push_back(at);
        at += slot(sizes[i]);
    }
    call->launch = {kernel->host, call->params.data(), {grid_x, grid_y, grid_z},
                    {block_x, block_y, block_z}, shared};
    if (emu::noop_mode) return CUDA_SUCCESS;
    emu::Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    emu::Context* context = stream->context;
    auto run = [call, context] {
        if (!context->sticky) emu::run_grid(call->launch);
    };
    emu::enqueue(stream, {kernel->name.c_str(), run, nullptr, {}});
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                          void** extra) {
    for (unsigned i = 0; i < config->numAttrs; i++) {
        // Attributes that change nothing here; clusters, cooperative launches etc. would.
        CUlaunchAttributeID id = config->attrs[i].id;
        if (id != CU_LAUNCH_ATTRIBUTE_IGNORE && id != CU_LAUNCH_ATTRIBUTE_PRIORITY)
            return emu::not_emulated(("launch attribute " + std::to_string(id)).c_str());
    }
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                          config->blockDimX, config->blockDimY, config->blockDimZ,
                          config->sharedMemBytes, config->hStream, params, extra);
}

}  // extern "C"
