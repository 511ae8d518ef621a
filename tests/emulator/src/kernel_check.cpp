// What kernels touch: g++ -fsanitize=thread calls these functions for every access of a kernel
// (libtsan itself is not linked). They feed four checks:
//   - alignment and bounds of shared memory, at once;
//   - races on shared memory between the barriers of a block;
//   - conflicts on global memory between blocks of one launch;
//   - at the end of the launch, the exact global ranges go to the race check and the memory check.
#include <algorithm>
#include <cstring>
#include <map>

#include "kernel_rt.h"

namespace emu {
namespace {

constexpr const char* shared_race =
    "two threads access the same shared memory, one of them writes, and no __syncthreads() (or "
    "__syncwarp() in one warp) lies between";
constexpr const char* block_conflict =
    "two blocks of the launch access the same global memory, one of them writes";

SharedByte* shared_bytes(uintptr_t address) {
    const Launch& launch = *scheduler.launch;
    auto begin = reinterpret_cast<uintptr_t>(launch.kernel->shared_begin);
    auto end = reinterpret_cast<uintptr_t>(launch.kernel->shared_end);
    if (address >= begin && address < end) return &scheduler.shared_static[address - begin];
    auto dynamic = reinterpret_cast<uintptr_t>(emu_dynamic_shared);
    if (address < dynamic || address >= dynamic + most_dynamic_shared) return nullptr;
    if (address >= dynamic + launch.dynamic_shared)
        kernel_failure("dynamic shared memory accessed at byte " +
                           std::to_string(address - dynamic) + ", the launch asked for " +
                           std::to_string(launch.dynamic_shared),
                       CUDA_ERROR_ILLEGAL_ADDRESS);
    return &scheduler.shared_dynamic[address - dynamic];
}

// True if `old` and an access of the current thread have no barrier between them.
bool concurrent(const SharedAccess& old) {
    const Fiber& me = *scheduler.current;
    int thread = static_cast<int>(&me - scheduler.fibers.data());
    if (old.thread < 0 || old.thread == thread || old.epoch != scheduler.epoch) return false;
    bool same_warp = old.thread / warp_lanes == me.warp;
    return !same_warp || old.warp_epoch == me.warp_epoch;
}

void touch_shared(SharedByte* bytes, size_t count, int access) {
    const Fiber& me = *scheduler.current;
    int thread = static_cast<int>(&me - scheduler.fibers.data());
    SharedAccess now{scheduler.epoch, me.warp_epoch, thread};
    for (size_t i = 0; i < count; i++) {
        SharedByte& byte = bytes[i];
        // Atomics count as reads against each other, and as writes against plain accesses: the
        // write stamp is left alone, so atomic-after-plain-write is found, the converse too.
        bool racy = concurrent(byte.write);
        if (access == EMU_WRITE)
            racy = racy || concurrent(byte.read) || concurrent(byte.other_read);
        if (racy) kernel_failure(shared_race);
        if (access == EMU_WRITE) {
            byte.write = now;
        } else {
            if (byte.read.thread != thread) byte.other_read = byte.read;
            byte.read = now;
        }
    }
}

Page& page_of(uintptr_t address) {
    uintptr_t number = address / Page::bytes;
    if (number != scheduler.last_page_number) {
        auto& page = scheduler.pages[number];
        if (!page) page = std::make_unique<Page>();
        scheduler.last_page_number = number;
        scheduler.last_page = page.get();
    }
    return *scheduler.last_page;
}

bool other_block(uint32_t who, uint32_t me) { return who != 0 && who != me; }

// The pattern "last block": a block publishes with __threadfence() before an atomic, and a block
// that did an atomic reads. Blocks run one after the other here, so this is as much as can be seen.
bool published_by(uint32_t who) {
    return scheduler.current_block_did_atomic && who != Page::several &&
           scheduler.published[who - 1];
}

void touch_global(uintptr_t address, size_t count, int access) {
    auto me = static_cast<uint32_t>(scheduler.block + 1);
    for (size_t i = 0; i < count; i++, address++) {
        Page& page = page_of(address);
        size_t at = address % Page::bytes;
        uint32_t &reader = page.reader[at], &writer = page.writer[at], &updater = page.updater[at];
        bool conflict = other_block(writer, me) && !published_by(writer);
        if (access == EMU_WRITE)
            conflict = conflict || other_block(reader, me) || other_block(updater, me);
        if (access == EMU_READ) conflict = conflict || (other_block(updater, me) &&
                                                        !scheduler.current_block_did_atomic);
        if (access == EMU_ATOMIC) conflict = conflict || other_block(reader, me);
        if (conflict) kernel_failure(block_conflict);
        uint32_t& mine = access == EMU_READ ? reader : access == EMU_WRITE ? writer : updater;
        mine = mine == 0 || mine == me ? me : Page::several;
    }
}

void touch(uintptr_t address, size_t count, int access, bool aligned) {
    if (!scheduler.checking || !scheduler.current) return;
    auto stack = reinterpret_cast<uintptr_t>(scheduler.current->stack);
    if (address >= stack && address < stack + stack_bytes) return;
    auto index = reinterpret_cast<uintptr_t>(&emu_thread_index);
    if (address >= index && address < index + 4 * sizeof(EmuDim)) return;
    if (aligned && address % count)
        kernel_failure("an access of " + std::to_string(count) + " bytes at an address that is "
                       "not a multiple of it", CUDA_ERROR_MISALIGNED_ADDRESS);
    if (SharedByte* bytes = shared_bytes(address)) {
        if (shared_bytes(address + count - 1) == bytes + count - 1)
            touch_shared(bytes, count, access);
    } else {
        touch_global(address, count, access);
    }
}

// Calls with each maximal range of bytes that `used` says yes to.
template <class Used, class Call>
void each_range(const std::map<uintptr_t, const Page*>& pages, Used used, Call call) {
    uintptr_t begin = 0, end = 0;
    for (const auto& [number, page] : pages)
        for (size_t i = 0; i < Page::bytes; i++) {
            if (!used(*page, i)) continue;
            uintptr_t at = number * Page::bytes + i;
            if (at != end) {
                if (end > begin) call(begin, end - begin);
                begin = at;
            }
            end = at + 1;
        }
    if (end > begin) call(begin, end - begin);
}

}  // namespace

void begin_launch_checks() {
    scheduler.checking = true;
    scheduler.epoch = 0;
    scheduler.pages.clear();
    scheduler.last_page_number = UINTPTR_MAX;
    const Launch& launch = *scheduler.launch;
    const KernelDef& kernel = *launch.kernel;
    auto static_bytes = static_cast<size_t>(kernel.shared_end - kernel.shared_begin);
    scheduler.shared_static.assign(static_bytes, SharedByte{});
    scheduler.shared_dynamic.assign(launch.dynamic_shared, SharedByte{});
    scheduler.published.assign(size_t{launch.grid[0]} * launch.grid[1] * launch.grid[2], false);
}

void end_launch_checks() {
    scheduler.checking = false;
    std::map<uintptr_t, const Page*> pages;
    for (const auto& [number, page] : scheduler.pages) pages[number] = page.get();
    const RecordPtr& record = running_record();
    auto pass_on = [&](int access) {
        return [&record, access](uintptr_t begin, size_t bytes) {
            race_access(record, begin, bytes, access);
            check_kernel_range(begin, bytes, record->label);
        };
    };
    if (record) {
        each_range(pages, [](const Page& p, size_t i) { return p.reader[i] != 0; },
                   pass_on(EMU_READ));
        each_range(pages, [](const Page& p, size_t i) { return p.writer[i] != 0; },
                   pass_on(EMU_WRITE));
        each_range(pages, [](const Page& p, size_t i) { return p.updater[i] != 0; },
                   pass_on(EMU_ATOMIC));
    }
    scheduler.pages.clear();
}

}  // namespace emu

// ---- called by the shim ---------------------------------------------------------------------
EMU_EXPORT void emu_touch_atomic(void* address, size_t bytes) {
    if (emu::scheduler.current) emu::scheduler.current_block_did_atomic = true;
    emu::touch(reinterpret_cast<uintptr_t>(address), bytes, EMU_ATOMIC, true);
}

// ---- called by code that g++ -fsanitize=thread instruments -----------------------------------
#define EMU_ACCESS_HOOKS(size)                                                              \
    EMU_EXPORT void __tsan_read##size(void* address) {                                      \
        emu::touch(reinterpret_cast<uintptr_t>(address), size, EMU_READ, true);             \
    }                                                                                       \
    EMU_EXPORT void __tsan_write##size(void* address) {                                     \
        emu::touch(reinterpret_cast<uintptr_t>(address), size, EMU_WRITE, true);            \
    }                                                                                       \
    EMU_EXPORT void __tsan_unaligned_read##size(void* address) {                            \
        emu::touch(reinterpret_cast<uintptr_t>(address), size, EMU_READ, false);            \
    }                                                                                       \
    EMU_EXPORT void __tsan_unaligned_write##size(void* address) {                           \
        emu::touch(reinterpret_cast<uintptr_t>(address), size, EMU_WRITE, false);           \
    }
EMU_ACCESS_HOOKS(1)
EMU_ACCESS_HOOKS(2)
EMU_ACCESS_HOOKS(4)
EMU_ACCESS_HOOKS(8)
EMU_ACCESS_HOOKS(16)

EMU_EXPORT void __tsan_read_range(void* address, size_t bytes) {
    if (bytes) emu::touch(reinterpret_cast<uintptr_t>(address), bytes, EMU_READ, false);
}
EMU_EXPORT void __tsan_write_range(void* address, size_t bytes) {
    if (bytes) emu::touch(reinterpret_cast<uintptr_t>(address), bytes, EMU_WRITE, false);
}
EMU_EXPORT void __tsan_init() {}
EMU_EXPORT void __tsan_func_entry(void*) {}
EMU_EXPORT void __tsan_func_exit() {}
EMU_EXPORT void __tsan_vptr_update(void*, void*) {}
