// Private to the emulated libcuda: records, clocks, streams, contexts, allocations, kernels.
#pragma once

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "emu.h"

namespace emu {

using Lock = std::unique_lock<std::mutex>;
using Time = std::chrono::steady_clock;

// Worker threads still run while the process exits, so no global is ever destroyed.
template <class T>
T& leaked() {
    return *new T;
}

// ---- order ----------------------------------------------------------------------------------
// A vector clock: entry 0 is the host, entry i the stream with index i; missing entries are 0.
using VectorClock = std::vector<uint32_t>;
void join(VectorClock& into, const VectorClock& from);

// One enqueued operation (or one declared access of the host).
struct Record {
    std::string label;
    uint32_t stream = 0;
    uint32_t tick = 0;     // the value of `clock[stream]` when it was enqueued
    VectorClock clock;     // what happens before it, itself included
    std::atomic<bool> done{false};
    Time::time_point finished;
};
using RecordPtr = std::shared_ptr<Record>;

// race.cpp
void race_access(const RecordPtr& record, uintptr_t begin, size_t bytes, int access);
void race_forget(uintptr_t begin, size_t bytes);
void race_reset();
extern std::atomic<bool> race_enabled;

// ---- contexts and streams -------------------------------------------------------------------
struct Context {
    int device = 0;
    int physical = 0;
    int references = 0;
    unsigned flags = 0;
    std::atomic<int> sticky{0};  // a failed kernel makes every later call fail, as on a GPU
    CUstream null_stream = nullptr;
};

struct Operation {
    std::function<void()> run;
    std::vector<RecordPtr> after;
    std::vector<EmuRange> ranges;
    RecordPtr record;
};

extern std::mutex& global_mutex;             // guards everything below
extern std::condition_variable& some_done;   // an operation has finished
extern std::set<CUstream>& all_streams;
extern VectorClock& host_clock;
extern bool initialised;
extern std::atomic<bool> forked;
extern bool trace_calls;
extern bool noop_mode;

int device_count();
Context* context_of(int device);
Context* current_context();
std::vector<Context*>& context_stack();
CUresult initialise();

CUstream new_stream(Context* context, unsigned flags, int priority);
// The stream behind a handle (default streams included), or nullptr. Needs the lock.
CUstream find_stream(CUstream handle);
struct Work {
    const char* label;
    std::function<void()> run;
    RecordPtr after;               // an event's record to wait for
    std::vector<EmuRange> ranges;
};
RecordPtr enqueue(CUstream stream, Work work);       // needs the lock
void wait_for(Lock& lock, const RecordPtr& record);  // the host waits, and is ordered after it
void wait_for_context(Lock& lock, Context* context);
const RecordPtr& running_record();                   // of the worker thread that asks
void fail_running(CUresult error, const std::string& why);

// ---- memory ---------------------------------------------------------------------------------
// cuda_memory.cpp. Which accesses of a kernel leave the allocation that they started in.
void check_kernel_range(uintptr_t begin, size_t bytes, const std::string& label);

// ---- kernels --------------------------------------------------------------------------------
struct KernelDef {  // the host version
    std::string name;
    void (*run_thread)(void** params) = nullptr;
    std::vector<size_t> sizes;
    char* shared_begin = nullptr;
    char* shared_end = nullptr;
};
KernelDef* find_kernel_def(const std::string& name);
std::vector<std::string> kernel_def_names();

// images.cpp: what a cubin or PTX says about its kernels.
struct ImageKernel {
    std::vector<size_t> sizes, offsets;
    size_t static_shared = 0;
    unsigned max_threads = 1024;
};
struct Image {
    int architecture = 0;  // 90 for sm_90; 0: not bound to one (PTX)
    std::map<std::string, ImageKernel> kernels;
};
bool parse_image(const void* data, Image& image);

// kernel_rt.cpp
struct Launch {
    const KernelDef* kernel;
    void** params;
    unsigned grid[3], block[3];
    size_t dynamic_shared;
};
void run_grid(const Launch& launch);

// proc_table.cpp
CUresult not_emulated(const char* what);

}  // namespace emu

// The handle types that cuda.h leaves open.
struct CUctx_st : emu::Context {};

struct CUstream_st {
    uint32_t index = 0;
    unsigned flags = 0;
    int priority = 0;
    bool closing = false;
    emu::Context* context = nullptr;
    emu::VectorClock clock;
    std::deque<emu::Operation> queue;
    std::condition_variable wake;
    emu::RecordPtr last;
};

struct CUevent_st {
    unsigned flags = 0;
    emu::RecordPtr record;
};

// ---- the frame of every driver entry point --------------------------------------------------
#define EMU_TRACE_CALL()                                        \
    do {                                                        \
        if (emu::trace_calls) fprintf(stderr, "[emucuda] %s\n", __func__); \
    } while (0)
#define EMU_NEEDS_INIT()                                        \
    EMU_TRACE_CALL();                                           \
    if (emu::forked || !emu::initialised) return CUDA_ERROR_NOT_INITIALIZED
#define EMU_NEEDS_CONTEXT()                                     \
    EMU_NEEDS_INIT();                                           \
    if (!emu::current_context()) return CUDA_ERROR_INVALID_CONTEXT; \
    if (int sticky_ = emu::current_context()->sticky.load()) return static_cast<CUresult>(sticky_)
#define EMU_FIND_STREAM(name, handle)                           \
    CUstream name = emu::find_stream(handle);                   \
    if (!name) return CUDA_ERROR_INVALID_HANDLE
