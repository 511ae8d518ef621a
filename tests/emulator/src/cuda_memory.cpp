// Device and pinned memory (host memory with guard zones), copies and fills.
//
// Fresh memory is all ones, which is NaN in every float type and -1 in every integer type; freed
// memory is filled too and stays in quarantine for a while, so that reads of either show.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_core.h"

namespace {

using emu::Lock;

constexpr size_t guard_bytes = 512;  // on both sides; also the alignment, as cuMemAlloc's is
constexpr unsigned char fresh_fill = 0xFF, guard_fill = 0xFB, freed_fill = 0xFE;

enum class Kind { host = 1, device = 2, managed = 3 };

struct Block {
    char* base = nullptr;  // of the whole block; the user's part starts guard_bytes later
    size_t bytes = 0;
    Kind kind = Kind::device;
    uint64_t id = 0;
    int device = 0;
    bool freed = false;
    size_t whole() const { return (bytes + 511) / 512 * 512 + 2 * guard_bytes; }
    uintptr_t begin() const { return reinterpret_cast<uintptr_t>(base) + guard_bytes; }
};

std::mutex& memory_mutex = emu::leaked<std::mutex>();
std::map<uintptr_t, Block>& blocks = emu::leaked<std::map<uintptr_t, Block>>();  // by base
std::deque<uintptr_t>& quarantine = emu::leaked<std::deque<uintptr_t>>();
size_t quarantined_bytes = 0;
uint64_t last_id = 0;

// The block (guard zones included, freed ones included) that holds an address.
Block* block_at(uintptr_t address) {
    auto it = blocks.upper_bound(address);
    if (it == blocks.begin()) return nullptr;
    --it;
    return address < it->first + it->second.whole() ? &it->second : nullptr;
}

Block* live_block_of(uintptr_t user_pointer) {
    Block* block = block_at(user_pointer);
    return block && !block->freed && block->begin() == user_pointer ? block : nullptr;
}

bool guards_intact(const Block& block) {
    for (const char* p = block.base; p < block.base + block.whole(); p++) {
        bool user = p >= block.base + guard_bytes && p < block.base + guard_bytes + block.bytes;
        if (!user && static_cast<unsigned char>(*p) != guard_fill) return false;
    }
    return true;
}

CUresult allocate(void** out, size_t bytes, Kind kind) {
    if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > (size_t{1} << 38)) return CUDA_ERROR_OUT_OF_MEMORY;
    Block block;
    block.bytes = bytes;
    block.kind = kind;
    block.device = emu::current_context() ? emu::current_context()->device : 0;
    void* base = nullptr;
    // 4096: ncclMemAlloc's buffers may become windows, which need that alignment of the user part.
    if (posix_memalign(&base, 4096, block.whole() + 4096)) return CUDA_ERROR_OUT_OF_MEMORY;
    block.base = static_cast<char*>(base) + 4096 - guard_bytes;
    memset(block.base, guard_fill, block.whole());
    memset(block.base + guard_bytes, fresh_fill, bytes);
    Lock lock(memory_mutex);
    block.id = ++last_id;
    blocks[reinterpret_cast<uintptr_t>(block.base)] = block;
    *out = block.base + guard_bytes;
    return CUDA_SUCCESS;
}

void release_oldest() {
    uintptr_t key = quarantine.front();
    quarantine.pop_front();
    Block& block = blocks[key];
    quarantined_bytes -= block.whole();
    free(block.base - 4096 + guard_bytes);
    blocks.erase(key);
}

// Needs memory_mutex. The block stays known, as freed, until the quarantine is full.
void retire(Block& block) {
    static const char* limit_mb = getenv("EMU_QUARANTINE_MB");
    static const size_t limit = (limit_mb ? strtoul(limit_mb, nullptr, 10) : 64) << 20;
    if (!guards_intact(block))
        emu_report("memory", ("writes beyond an allocation of " + std::to_string(block.bytes) +
                              " bytes, found when it was freed").c_str());
    emu::race_forget(block.begin(), block.bytes);
    memset(block.base + guard_bytes, freed_fill, block.bytes);
    block.freed = true;
    quarantine.push_back(reinterpret_cast<uintptr_t>(block.base));
    quarantined_bytes += block.whole();
    while (quarantined_bytes > limit && quarantine.size() > 1) release_oldest();
}

CUresult free_now(void* pointer) {
    if (!pointer) return CUDA_SUCCESS;
    {
        Lock lock(memory_mutex);
        if (!live_block_of(reinterpret_cast<uintptr_t>(pointer))) return CUDA_ERROR_INVALID_VALUE;
    }
    {  // cuMemFree waits for the device
        Lock lock(emu::global_mutex);
        if (emu::current_context()) emu::wait_for_context(lock, emu::current_context());
    }
    Lock lock(memory_mutex);
    Block* block = live_block_of(reinterpret_cast<uintptr_t>(pointer));
    if (!block) return CUDA_ERROR_INVALID_VALUE;
    retire(*block);
    return CUDA_SUCCESS;
}

std::string problem_with(uintptr_t begin, size_t bytes) {
    Lock lock(memory_mutex);
    Block* block = block_at(begin);
    if (!block && bytes) block = block_at(begin + bytes - 1);
    if (!block || bytes == 0) return "";
    if (block->freed) return "touches freed memory";
    if (begin >= block->begin() && begin + bytes <= block->begin() + block->bytes) return "";
    char text[160];
    snprintf(text, sizeof text, "touches bytes [%ld, %ld) of an allocation of %zu bytes",
             static_cast<long>(begin - block->begin()),
             static_cast<long>(begin + bytes - block->begin()), block->bytes);
    return text;
}

CUresult copy(void* to, const void* from, size_t bytes, CUstream handle, const char* label,
              bool host_waits) {
    if (emu_check_range(from, bytes, label) || emu_check_range(to, bytes, label))
        return CUDA_ERROR_INVALID_VALUE;
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    auto record = emu::enqueue(stream, {label, [=] { memmove(to, from, bytes); }, nullptr,
                                        {{from, bytes, EMU_READ}, {to, bytes, EMU_WRITE}}});
    if (host_waits) emu::wait_for(lock, record);
    return CUDA_SUCCESS;
}

template <class T>
CUresult fill(CUdeviceptr to, T value, size_t count, CUstream handle) {
    auto* target = reinterpret_cast<T*>(to);
    if (to % sizeof(T) || emu_check_range(target, count * sizeof(T), "memset"))
        return CUDA_ERROR_INVALID_VALUE;
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    auto run = [=] {
        for (size_t i = 0; i < count; i++) target[i] = value;
    };
    emu::enqueue(stream, {"memset", run, nullptr, {{target, count * sizeof(T), EMU_WRITE}}});
    return CUDA_SUCCESS;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

void emu::check_kernel_range(uintptr_t begin, size_t bytes, const std::string&) {
    std::string problem = problem_with(begin, bytes);
    if (!problem.empty()) fail_running(CUDA_ERROR_ILLEGAL_ADDRESS, "the kernel " + problem);
}

int emu_check_range(const void* ptr, size_t bytes, const char* label) {
    std::string problem = problem_with(reinterpret_cast<uintptr_t>(ptr), bytes);
    if (problem.empty()) return 0;
    emu_report("memory", (std::string(label) + " " + problem).c_str());
    return 1;
}

extern "C" {

// ---- allocation -----------------------------------------------------------------------------
CUresult cuMemAlloc(CUdeviceptr* out, size_t bytes) {
    EMU_NEEDS_CONTEXT();
    return allocate(reinterpret_cast<void**>(out), bytes, Kind::device);
}

CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned) {
    EMU_NEEDS_CONTEXT();
    return allocate(reinterpret_cast<void**>(out), bytes, Kind::managed);
}

CUresult cuMemAllocHost(void** out, size_t bytes) {
    EMU_NEEDS_CONTEXT();
    return allocate(out, bytes, Kind::host);
}

CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned) {
    EMU_NEEDS_CONTEXT();
    return allocate(out, bytes, Kind::host);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* out, void* host, unsigned) {
    EMU_NEEDS_INIT();
    *out = reinterpret_cast<CUdeviceptr>(host);
    return CUDA_SUCCESS;
}

// The allocation is an operation of the stream: use on another stream needs an order, as the
// race check will say, since the block counts as written here.
CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream handle) {
    EMU_NEEDS_CONTEXT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    CUresult result = allocate(reinterpret_cast<void**>(out), bytes, Kind::device);
    if (result) return result;
    emu::enqueue(stream, {"memAllocAsync", nullptr, nullptr, {{pointer(*out), bytes, EMU_WRITE}}});
    return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t bytes, CUmemoryPool, CUstream stream) {
    return cuMemAllocAsync(out, bytes, stream);
}

CUresult cuMemFree(CUdeviceptr address) {
    EMU_NEEDS_INIT();
    return free_now(pointer(address));
}

CUresult cuMemFreeHost(void* host) {
    EMU_NEEDS_INIT();
    return free_now(host);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    EMU_NEEDS_INIT();
    Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, handle);
    size_t bytes = 0;
    {
        Lock memory(memory_mutex);
        Block* block = live_block_of(address);
        if (!block) return CUDA_ERROR_INVALID_VALUE;
        bytes = block->bytes;
    }
    auto run = [=] {
        Lock memory(memory_mutex);
        if (Block* block = live_block_of(address)) retire(*block);
    };
    emu::enqueue(stream, {"memFreeAsync", run, nullptr, {{pointer(address), bytes, EMU_WRITE}}});
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
    EMU_NEEDS_INIT();
    *pool = reinterpret_cast<CUmemoryPool>(uintptr_t{0x100} + static_cast<unsigned>(device));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    return cuDeviceGetMemPool(pool, device);
}

CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void* value) {
    EMU_NEEDS_INIT();
    memset(value, 0, sizeof(cuuint64_t));
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) {
    EMU_NEEDS_INIT();
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    EMU_NEEDS_CONTEXT();
    *free_bytes = *total_bytes = size_t{1} << 32;
    return CUDA_SUCCESS;
}

// ---- copies and fills -----------------------------------------------------------------------
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return copy(pointer(to), pointer(from), bytes, stream, "memcpyAsync", false);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return copy(pointer(to), from, bytes, stream, "memcpyHtoDAsync", false);
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return copy(to, pointer(from), bytes, stream, "memcpyDtoHAsync", false);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return copy(pointer(to), pointer(from), bytes, stream, "memcpyDtoDAsync", false);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    EMU_NEEDS_CONTEXT();
    return copy(pointer(to), pointer(from), bytes, nullptr, "memcpy", true);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    EMU_NEEDS_CONTEXT();
    return copy(pointer(to), from, bytes, nullptr, "memcpyHtoD", true);
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    EMU_NEEDS_CONTEXT();
    return copy(to, pointer(from), bytes, nullptr, "memcpyDtoH", true);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    EMU_NEEDS_CONTEXT();
    return copy(pointer(to), pointer(from), bytes, nullptr, "memcpyDtoD", false);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return fill(to, value, count, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return fill(to, value, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    EMU_NEEDS_CONTEXT();
    return fill(to, value, count, stream);
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
    return cuMemsetD8Async(to, value, count, nullptr);
}

CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
    return cuMemsetD16Async(to, value, count, nullptr);
}

CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
    return cuMemsetD32Async(to, value, count, nullptr);
}

// ---- pointer attributes ---------------------------------------------------------------------
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    EMU_NEEDS_INIT();
    // With EMU_HOST_IS_DEVICE, plain host memory (a torch CPU tensor) passes for device memory.
    static const bool host_is_device = getenv("EMU_HOST_IS_DEVICE") != nullptr;
    Lock lock(memory_mutex);
    Block* found = block_at(address);
    bool inside = found && !found->freed && address >= found->begin() &&
                  address < found->begin() + found->bytes;
    if (!inside && !host_is_device) return CUDA_ERROR_INVALID_VALUE;
    Block block;
    if (inside) block = *found;
    uintptr_t begin = inside ? block.begin() : address;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *static_cast<void**>(value) = emu::context_of(block.device);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(value) =
                block.kind == Kind::host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            *static_cast<void**>(value) = pointer(address);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            *static_cast<uint64_t*>(value) = block.id;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            *static_cast<unsigned*>(value) = block.kind == Kind::managed;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(value) = block.device;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            *static_cast<void**>(value) = pointer(begin);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            *static_cast<size_t*>(value) = block.bytes;
            return CUDA_SUCCESS;
        default:
            return emu::not_emulated("cuPointerGetAttribute, this attribute");
    }
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values,
                                CUdeviceptr address) {
    EMU_NEEDS_INIT();
    for (unsigned i = 0; i < count; i++)  // unknown memory: zeros and success, as documented
        if (cuPointerGetAttribute(values[i], attributes[i], address) && values[i])
            *static_cast<int*>(values[i]) = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    EMU_NEEDS_INIT();
    Lock lock(memory_mutex);
    Block* block = block_at(address);
    if (!block || block->freed) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = block->begin();
    if (bytes) *bytes = block->bytes;
    return CUDA_SUCCESS;
}

}  // extern "C"
