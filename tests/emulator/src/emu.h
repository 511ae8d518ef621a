// Private interface between the emulated libcuda, the emulated libnccl, the host versions of the
// kernels and the Python side (which calls the "test controls" by ctypes). Plain C types only.
#pragma once

#include <cstddef>
#include <cstdint>

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

enum EmuAccess { EMU_READ = 0, EMU_WRITE = 1, EMU_ATOMIC = 2 };

struct EmuRange {
    const void* ptr;
    size_t bytes;
    int access;  // EmuAccess
};

typedef void (*EmuFn)(void* user);

// ---- for libnccl and for test callbacks -----------------------------------------------------
// Enqueues fn(user) on a stream and declares the memory that it touches. Returns a CUresult.
EMU_EXPORT int emu_enqueue(void* stream, const char* label, EmuFn fn, void* user,
                           const EmuRange* ranges, int count);
// Everything enqueued on `later` from now on runs after everything enqueued on `earlier` so far.
EMU_EXPORT int emu_stream_follow(void* later, void* earlier);
// The identity of the current context's device on the emulated machine (CUDA_VISIBLE_DEVICES
// renumbers devices, two processes may hold the same one), or a negative number: no context.
EMU_EXPORT int emu_physical_device();
// The ordinal of the current context's device, or a negative number.
EMU_EXPORT int emu_current_device();
// Makes the device's context current on the calling thread (helper threads of libnccl).
EMU_EXPORT void emu_use_device(int ordinal);
// 0 if [ptr, ptr + bytes) lies in one live allocation or in memory that the emulator does not
// know (plain host memory); otherwise reports a "memory" problem and returns 1.
EMU_EXPORT int emu_check_range(const void* ptr, size_t bytes, const char* label);
// True in a child of fork(): nothing of CUDA may be used there, and no lock may be taken.
EMU_EXPORT int emu_forked();
// True in the no-op mode (EMU_NOOP), where calls are checked and then do nothing.
EMU_EXPORT int emu_noop();

// ---- for the host versions of kernels -------------------------------------------------------
struct EmuKernelEntry {
    const char* name;
    void (*run_thread)(void** params);  // the kernel's body for the current thread
    int param_count;
    const size_t* param_sizes;
    char* shared_begin;  // the kernel file's static shared memory
    char* shared_end;
};
EMU_EXPORT void emu_register_kernel(const EmuKernelEntry* entry);

// ---- reports --------------------------------------------------------------------------------
// kind: "race", "unknown" (function that is not emulated), "kernel", "memory", "mismatch".
// Kept in memory for the test, and appended to $EMU_REPORT_DIR/<pid> for its parent process.
EMU_EXPORT void emu_report(const char* kind, const char* text);

// ---- test controls --------------------------------------------------------------------------
EMU_EXPORT long emu_report_count(const char* kind);  // kind NULL: all
EMU_EXPORT int emu_report_get(const char* kind, long index, char* text, size_t size);
EMU_EXPORT void emu_reset();  // forgets reports, access history and sticky errors
EMU_EXPORT void emu_race_enable(int on);
EMU_EXPORT void emu_set_delay(double probability, unsigned max_us, unsigned seed);
EMU_EXPORT void emu_host_access(const void* ptr, size_t bytes, int access, const char* label);
EMU_EXPORT void emu_race_forget(const void* ptr, size_t bytes);  // it was allocated anew
// Waits until every stream is idle, without counting as a synchronisation for the race check.
// Returns 1 when idle, 0 when `timeout_ms` passed first.
EMU_EXPORT int emu_drain(int timeout_ms);
