// Private to the kernel runtime: the block that is being run, and the access checks' state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_core.h"

struct EmuDim {  // the same in cuda_shim.h
    unsigned x, y, z;
};

namespace emu {

constexpr size_t stack_bytes = 64 << 10;
constexpr int warp_lanes = 32;
constexpr size_t most_dynamic_shared = 228 << 10;

enum class State { ready, at_block_barrier, at_warp_operation, exited };

// A GPU thread.
struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    State state = State::ready;
    EmuDim index{};
    int lane = 0, warp = 0;
    int site = 0;           // which barrier or warp operation in the source it waits at
    unsigned mask = 0;      // of the warp operation
    uint64_t value = 0;     // what it hands to the other lanes (or to __syncthreads_or and so on)
    int source = -1;        // the lane whose value it wants; -1: the ballot of all
    uint64_t result = 0;
    uint32_t warp_epoch = 0;  // how many __syncwarp()s it has passed
};

// Who accessed a byte of shared memory last, and when: `epoch` counts the block's barriers over
// the whole launch, `warp_epoch` the __syncwarp()s of the thread.
struct SharedAccess {
    uint32_t epoch = 0, warp_epoch = 0;
    int thread = -1;
};
struct SharedByte {
    SharedAccess write, read, other_read;  // two different readers are enough to find a conflict
};

// Which bytes of a page a launch accessed, and which block did (block number + 1).
struct Page {
    static constexpr size_t bytes = 4096;
    static constexpr uint32_t several = UINT32_MAX;
    uint32_t reader[bytes] = {}, writer[bytes] = {}, updater[bytes] = {};
};

// One launch at a time runs in the process: shared memory is static memory of the kernel's file,
// and the fibers all run on the calling thread.
struct Scheduler {
    const Launch* launch = nullptr;
    std::vector<Fiber> fibers;
    std::vector<char*> stacks;
    void* main_stack_pointer = nullptr;
    Fiber* current = nullptr;
    int threads = 0;
    size_t block = 0;  // linear index of the current block
    bool failed = false;

    bool checking = false;
    std::vector<SharedByte> shared_static, shared_dynamic;
    uint32_t epoch = 0;
    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
    uintptr_t last_page_number = UINTPTR_MAX;
    Page* last_page = nullptr;
    std::vector<bool> published;  // blocks that called __threadfence()
    bool current_block_did_atomic = false;
};
extern Scheduler& scheduler;

// Stops the launch with a message. The fiber that calls it does not go on.
void kernel_failure(const std::string& why, CUresult error = CUDA_ERROR_LAUNCH_FAILED);
// kernel_check.cpp
void begin_launch_checks();
void end_launch_checks();

}  // namespace emu

extern "C" {
extern EmuDim emu_thread_index, emu_block_index, emu_block_size, emu_grid_size;
extern char emu_dynamic_shared[];
}
