// Runs the host version of a kernel: the threads of a block are fibers on the calling thread,
// blocks and warps run in random order (so that a missing barrier shows in the result too).
#include "kernel_rt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#ifndef __x86_64__
#error "the fiber switch is written for x86-64"
#endif

// emu_switch_fiber(void** save_here, void* go_there): swaps the callee-saved registers and stack.
asm(R"(
.text
.type emu_switch_fiber, @function
emu_switch_fiber:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
extern "C" __attribute__((visibility("hidden"))) void emu_switch_fiber(void** save, void* to);

extern "C" {
EmuDim emu_thread_index, emu_block_index, emu_block_size, emu_grid_size;
alignas(1024) char emu_dynamic_shared[emu::most_dynamic_shared];
}

namespace emu {

Scheduler& scheduler = leaked<Scheduler>();

namespace {

std::mutex& launch_mutex = leaked<std::mutex>();
std::mt19937& random_order = *new std::mt19937(12345);

void wait_as(State state, int site) {
    Fiber* me = scheduler.current;
    me->state = state;
    me->site = site;
    emu_switch_fiber(&me->stack_pointer, scheduler.main_stack_pointer);
}

void fiber_main() {
    scheduler.launch->kernel->run_thread(scheduler.launch->params);
    scheduler.current->state = State::exited;
    emu_switch_fiber(&scheduler.current->stack_pointer, scheduler.main_stack_pointer);
    abort();  // an exited fiber is never resumed
}

void prepare_fiber(int thread) {
    Fiber& fiber = scheduler.fibers[thread];
    unsigned x = emu_block_size.x, y = emu_block_size.y, t = static_cast<unsigned>(thread);
    fiber = Fiber{};
    fiber.stack = scheduler.stacks[thread];
    fiber.index = {t % x, t / x % y, t / (x * y)};
    fiber.lane = thread % warp_lanes;
    fiber.warp = thread / warp_lanes;
    auto** top = reinterpret_cast<void**>(fiber.stack + stack_bytes - 16);
    *--top = nullptr;  // fiber_main's return address: keeps the stack aligned, is never used
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that the switch pops
    fiber.stack_pointer = top;
}

void poison_shared_memory() {
    const KernelDef& kernel = *scheduler.launch->kernel;
    if (kernel.shared_begin)
        memset(kernel.shared_begin, 0xFF,
               static_cast<size_t>(kernel.shared_end - kernel.shared_begin));
    memset(emu_dynamic_shared, 0xFF, scheduler.launch->dynamic_shared);
}

bool run_ready_lanes(int first, int last) {
    bool ran = false;
    int count = last - first;
    int start = static_cast<int>(random_order() % static_cast<unsigned>(count));
    for (int j = 0; j < count && !scheduler.failed; j++) {
        Fiber& fiber = scheduler.fibers[first + (j + start) % count];
        if (fiber.state != State::ready) continue;
        ran = true;
        scheduler.current = &fiber;
        emu_thread_index = fiber.index;
        emu_switch_fiber(&scheduler.main_stack_pointer, fiber.stack_pointer);
        scheduler.current = nullptr;
    }
    return ran;
}

bool takes_part(const Fiber& fiber, unsigned mask) {
    return mask >> fiber.lane & 1 && fiber.state != State::exited;
}

// Releases the lanes whose warp operation is complete: every lane of the mask that has not exited
// is at the same operation with the same mask. True if any was released. Results are worked out
// here, while the values of all lanes are in place.
bool complete_warp_operations(int first, int last) {
    bool released = false;
    auto& fibers = scheduler.fibers;
    for (int i = first; i < last; i++) {
        if (fibers[i].state != State::at_warp_operation) continue;
        unsigned mask = fibers[i].mask;
        int site = fibers[i].site;
        bool complete = true;
        uint64_t ballot = 0;
        for (int j = first; j < last; j++) {
            const Fiber& other = fibers[j];
            if (!takes_part(other, mask)) continue;
            complete = complete && other.state == State::at_warp_operation &&
                       other.site == site && other.mask == mask;
            ballot |= static_cast<uint64_t>(other.value != 0) << other.lane;
        }
        if (!complete) continue;
        for (int j = first; j < last; j++) {
            Fiber& fiber = fibers[j];
            if (!takes_part(fiber, mask)) continue;
            int source = first + fiber.source;
            // A lane that has exited, or never was, has no value to give: poison.
            bool given = source < last && takes_part(fibers[source], mask);
            fiber.result = fiber.source < 0 ? ballot : given ? fibers[source].value : UINT64_MAX;
        }
        for (int j = first; j < last; j++)
            if (takes_part(fibers[j], mask)) fibers[j].state = State::ready;
        released = true;
    }
    return released;
}

void describe_stuck_block(int at_barrier, int exited) {
    bool warp_operation = false;
    for (const Fiber& fiber : scheduler.fibers)
        warp_operation = warp_operation || fiber.state == State::at_warp_operation;
    if (warp_operation)
        kernel_failure("a warp operation (shuffle, ballot, __syncwarp) that not every lane of its "
                       "mask reaches with the same mask");
    else
        kernel_failure("__syncthreads() reached by " + std::to_string(at_barrier) + " of " +
                       std::to_string(scheduler.threads) + " threads, " + std::to_string(exited) +
                       " have exited");
}

// True if the block may go on (or is finished).
bool pass_block_barrier() {
    int at_barrier = 0, exited = 0, site = -1, any = 0, all = 1, count = 0;
    bool one_site = true;
    for (const Fiber& fiber : scheduler.fibers) {
        exited += fiber.state == State::exited;
        if (fiber.state != State::at_block_barrier) continue;
        at_barrier++;
        one_site = one_site && (site < 0 || site == fiber.site);
        site = fiber.site;
        any |= fiber.value != 0;
        all &= fiber.value != 0;
        count += fiber.value != 0;
    }
    if (exited == scheduler.threads) return true;
    if (at_barrier < scheduler.threads) {
        describe_stuck_block(at_barrier, exited);
        return false;
    }
    if (!one_site) {
        kernel_failure("threads of one block wait at different __syncthreads()");
        return false;
    }
    for (Fiber& fiber : scheduler.fibers) {
        fiber.state = State::ready;
        fiber.result = static_cast<uint64_t>(any) | static_cast<uint64_t>(all) << 1 |
                       static_cast<uint64_t>(count) << 2;
    }
    scheduler.epoch++;
    return true;
}

void run_block() {
    int threads = scheduler.threads;
    for (int i = 0; i < threads; i++) prepare_fiber(i);
    poison_shared_memory();
    scheduler.epoch++;
    std::vector<int> warps((threads + warp_lanes - 1) / warp_lanes);
    for (size_t i = 0; i < warps.size(); i++) warps[i] = static_cast<int>(i);
    auto finished = [] {
        for (const Fiber& fiber : scheduler.fibers)
            if (fiber.state != State::exited) return false;
        return true;
    };
    while (!scheduler.failed && !finished()) {
        std::shuffle(warps.begin(), warps.end(), random_order);
        for (int warp : warps) {
            int first = warp * warp_lanes, last = std::min(threads, first + warp_lanes);
            do {
                run_ready_lanes(first, last);
            } while (!scheduler.failed && complete_warp_operations(first, last));
        }
        if (scheduler.failed || !pass_block_barrier()) return;
    }
}

void need_stacks(int count) {
    while (static_cast<int>(scheduler.stacks.size()) < count) {
        void* stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) abort();
        scheduler.stacks.push_back(static_cast<char*>(stack));
    }
}

}  // namespace

void kernel_failure(const std::string& why, CUresult error) {
    if (!scheduler.failed) {
        char where[120] = "";
        if (scheduler.current)
            snprintf(where, sizeof where, " [block (%u, %u, %u), thread (%u, %u, %u)]",
                     emu_block_index.x, emu_block_index.y, emu_block_index.z,
                     scheduler.current->index.x, scheduler.current->index.y,
                     scheduler.current->index.z);
        fail_running(error, why + where);
    }
    scheduler.failed = true;
    // The fiber's stack is simply abandoned: the launch is over.
    if (scheduler.current) wait_as(State::exited, 0);
}

void run_grid(const Launch& launch) {
    Lock lock(launch_mutex);
    scheduler.launch = &launch;
    scheduler.failed = false;
    scheduler.current = nullptr;
    emu_block_size = {launch.block[0], launch.block[1], launch.block[2]};
    emu_grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
    scheduler.threads = static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]);
    need_stacks(scheduler.threads);
    scheduler.fibers.resize(static_cast<size_t>(scheduler.threads));
    begin_launch_checks();
    size_t blocks = size_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    std::vector<uint32_t> order(blocks);
    for (size_t i = 0; i < blocks; i++) order[i] = static_cast<uint32_t>(i);
    std::shuffle(order.begin(), order.end(), random_order);
    for (uint32_t block : order) {
        if (scheduler.failed) break;
        scheduler.block = block;
        scheduler.current_block_did_atomic = false;
        emu_block_index = {block % launch.grid[0], block / launch.grid[0] % launch.grid[1],
                           block / launch.grid[0] / launch.grid[1]};
        run_block();
    }
    end_launch_checks();
    scheduler.launch = nullptr;
}

}  // namespace emu

// ---- called by the shim ---------------------------------------------------------------------
using emu::scheduler;
using emu::State;

EMU_EXPORT int emu_lane() { return scheduler.current->lane; }

// Returns whether any thread gave a value other than 0 (bit 0), whether all did (bit 1), and how
// many did (from bit 2 on).
EMU_EXPORT unsigned emu_block_barrier(int site, int value) {
    scheduler.current->value = value != 0;
    emu::wait_as(State::at_block_barrier, site);
    return static_cast<unsigned>(scheduler.current->result);
}

namespace {

uint64_t warp_operation(unsigned mask, int site, uint64_t value, int source) {
    emu::Fiber* me = scheduler.current;
    if (!(mask >> me->lane & 1))
        emu::kernel_failure("a warp operation whose mask does not name the calling lane");
    if (source >= 0 && !(mask >> source & 1))
        emu::kernel_failure("a shuffle reads lane " + std::to_string(source) +
                            ", which its mask does not name");
    me->value = value;
    me->source = source;
    me->mask = mask;
    emu::wait_as(State::at_warp_operation, site);
    return me->result;
}

}  // namespace

EMU_EXPORT void emu_warp_barrier(unsigned mask, int site) {
    emu::Fiber* me = scheduler.current;
    warp_operation(mask, site, 0, -1);
    me->warp_epoch++;
}

EMU_EXPORT uint64_t emu_shuffle(unsigned mask, uint64_t value, int source, int site) {
    return warp_operation(mask, site, value, source);
}

EMU_EXPORT unsigned emu_ballot(unsigned mask, int predicate, int site) {
    return static_cast<unsigned>(warp_operation(mask, site, predicate != 0, -1));
}

EMU_EXPORT unsigned emu_active_mask() {  // as if the warp had never diverged
    int first = scheduler.current->warp * emu::warp_lanes;
    unsigned mask = 0;
    for (int i = first; i < scheduler.threads && i < first + emu::warp_lanes; i++)
        if (scheduler.fibers[i].state != State::exited) mask |= 1u << scheduler.fibers[i].lane;
    return mask;
}

EMU_EXPORT void emu_thread_fence() {
    if (scheduler.checking) scheduler.published[scheduler.block] = true;
}

EMU_EXPORT void emu_trap(const char* why) { emu::kernel_failure(why); }
