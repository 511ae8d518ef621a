// Streams (a worker thread each), events' records, the host's clock, injected delays.
#include "cuda_core.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

namespace emu {

std::mutex& global_mutex = leaked<std::mutex>();
std::condition_variable& some_done = leaked<std::condition_variable>();
std::set<CUstream>& all_streams = leaked<std::set<CUstream>>();
VectorClock& host_clock = *new VectorClock(1, 1);
bool initialised = false;
std::atomic<bool> forked{false};
bool trace_calls = getenv("EMU_TRACE") != nullptr;
bool noop_mode = getenv("EMU_NOOP") != nullptr;

namespace {

std::vector<std::unique_ptr<CUctx_st>>& contexts = leaked<std::vector<std::unique_ptr<CUctx_st>>>();
uint32_t next_stream_index = 1;
thread_local RecordPtr current_record;
thread_local Context* record_context = nullptr;

// Delays make a missing wait show as wrong data: the second net below the race check.
struct Delays {
    double probability = 0;
    unsigned max_us = 0;
    std::mt19937 random;
};
Delays& delays = leaked<Delays>();

unsigned next_delay_us() {
    if (!delays.max_us) return 0;
    if (std::uniform_real_distribution<>()(delays.random) >= delays.probability) return 0;
    return delays.random() % (delays.max_us + 1);
}

void finish(const RecordPtr& record) {
    record->finished = Time::now();
    record->done = true;
    some_done.notify_all();
}

void worker(CUstream stream) {
    pthread_setname_np(pthread_self(), ("emustream" + std::to_string(stream->index)).c_str());
    record_context = stream->context;
    context_stack() = {stream->context};  // for callbacks that call the driver
    Lock lock(global_mutex);
    for (;;) {
        stream->wake.wait(lock, [&] { return !stream->queue.empty() || stream->closing; });
        if (stream->queue.empty()) break;
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        for (const RecordPtr& dependency : operation.after)
            some_done.wait(lock, [&] { return dependency->done.load(); });
        unsigned delay_us = next_delay_us();
        lock.unlock();
        if (delay_us) usleep(delay_us);
        current_record = operation.record;
        for (const EmuRange& range : operation.ranges)
            race_access(operation.record, reinterpret_cast<uintptr_t>(range.ptr), range.bytes,
                        range.access);
        if (operation.run) operation.run();
        operation.run = nullptr;
        current_record.reset();
        lock.lock();
        finish(operation.record);
    }
    all_streams.erase(stream);
    lock.unlock();
    delete stream;
}

// CUDA_VISIBLE_DEVICES renumbers the EMU_CUDA_NDEV devices of the emulated machine; as in CUDA,
// the list ends at its first invalid entry.
std::vector<int> visible_devices() {
    const char* text = getenv("EMU_CUDA_NDEV");
    int total = text ? atoi(text) : 1;
    std::vector<int> devices;
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int i = 0; i < total; i++) devices.push_back(i);
        return devices;
    }
    for (const char* at = visible; *at;) {
        char* end = nullptr;
        long device = strtol(at, &end, 10);
        if (end == at || device < 0 || device >= total) break;
        devices.push_back(static_cast<int>(device));
        at = *end == ',' ? end + 1 : end + strlen(end);
    }
    return devices;
}

}  // namespace

CUresult initialise() {
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    Lock lock(global_mutex);
    if (initialised) return CUDA_SUCCESS;
    std::vector<int> devices = visible_devices();
    if (devices.empty()) return CUDA_ERROR_NO_DEVICE;
    for (size_t i = 0; i < devices.size(); i++) {
        contexts.push_back(std::make_unique<CUctx_st>());
        contexts.back()->device = static_cast<int>(i);
        contexts.back()->physical = devices[i];
    }
    if (const char* text = getenv("EMU_DELAY")) {
        unsigned seed = 1;
        sscanf(text, "%lf,%u,%u", &delays.probability, &delays.max_us, &seed);
        delays.random.seed(seed ^ static_cast<unsigned>(getpid()));
    }
    const char* race = getenv("EMU_RACE");
    race_enabled = race && strcmp(race, "0") != 0 && !noop_mode;
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    initialised = true;
    return CUDA_SUCCESS;
}

int device_count() { return static_cast<int>(contexts.size()); }

Context* context_of(int device) { return contexts.at(device).get(); }

std::vector<Context*>& context_stack() {
    static thread_local std::vector<Context*> stack;
    return stack;
}

Context* current_context() {
    auto& stack = context_stack();
    return stack.empty() ? nullptr : stack.back();
}

const RecordPtr& running_record() { return current_record; }

void fail_running(CUresult error, const std::string& why) {
    std::string label = current_record ? current_record->label : "?";
    if (record_context) {
        int none = 0;
        record_context->sticky.compare_exchange_strong(none, error);
    }
    emu_report("kernel", ("'" + label + "': " + why).c_str());
}

CUstream new_stream(Context* context, unsigned flags, int priority) {
    auto* stream = new CUstream_st;
    stream->index = next_stream_index++;
    stream->flags = flags;
    stream->priority = priority;
    stream->context = context;
    all_streams.insert(stream);
    std::thread(worker, stream).detach();
    return stream;
}

CUstream find_stream(CUstream handle) {
    // Per-thread default streams are treated as the legacy one: stricter order than the real one
    // would have, and the product uses neither.
    if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        Context* context = current_context();
        if (!context) return nullptr;
        if (!context->null_stream) context->null_stream = new_stream(context, 0, 0);
        return context->null_stream;
    }
    auto it = all_streams.find(handle);
    return it == all_streams.end() || handle->closing ? nullptr : handle;
}

namespace {

void depend(CUstream stream, Operation& operation, const RecordPtr& record) {
    if (!record) return;
    if (!record->done) operation.after.push_back(record);
    join(stream->clock, record->clock);
}

}  // namespace

RecordPtr enqueue(CUstream stream, Work work) {
    Operation operation;
    operation.run = std::move(work.run);
    operation.ranges = std::move(work.ranges);
    depend(stream, operation, work.after);
    // The legacy default stream waits for the blocking streams of its context, and they for it.
    Context* context = stream->context;
    if (stream == context->null_stream) {
        for (CUstream other : all_streams)
            if (other != stream && other->context == context &&
                !(other->flags & CU_STREAM_NON_BLOCKING))
                depend(stream, operation, other->last);
    } else if (!(stream->flags & CU_STREAM_NON_BLOCKING) && context->null_stream) {
        depend(stream, operation, context->null_stream->last);
    }
    join(stream->clock, host_clock);
    // A callback that enqueues work: that work comes after the callback's own operation.
    if (current_record) join(stream->clock, current_record->clock);
    if (stream->clock.size() <= stream->index) stream->clock.resize(stream->index + 1);
    auto record = std::make_shared<Record>();
    record->label = work.label;
    record->stream = stream->index;
    record->tick = ++stream->clock[stream->index];
    record->clock = stream->clock;
    host_clock[0]++;
    operation.record = record;
    stream->last = record;
    stream->queue.push_back(std::move(operation));
    stream->wake.notify_one();
    return record;
}

void wait_for(Lock& lock, const RecordPtr& record) {
    if (!record) return;
    RecordPtr kept = record;  // the event may be recorded anew or destroyed meanwhile
    some_done.wait(lock, [&] { return kept->done.load(); });
    join(host_clock, kept->clock);
}

void wait_for_context(Lock& lock, Context* context) {
    std::vector<RecordPtr> records;
    for (CUstream stream : all_streams)
        if (stream->context == context && stream->last) records.push_back(stream->last);
    for (const RecordPtr& record : records) wait_for(lock, record);
}

}  // namespace emu

// ---- private interface and test controls ----------------------------------------------------
int emu_enqueue(void* handle, const char* label, EmuFn fn, void* user, const EmuRange* ranges,
                int count) {
    EMU_NEEDS_INIT();
    emu::Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(stream, static_cast<CUstream>(handle));
    std::vector<EmuRange> touched(ranges, ranges + count);
    emu::enqueue(stream, {label, [=] { fn(user); }, nullptr, std::move(touched)});
    return CUDA_SUCCESS;
}

int emu_stream_follow(void* later, void* earlier) {
    EMU_NEEDS_INIT();
    emu::Lock lock(emu::global_mutex);
    EMU_FIND_STREAM(source, static_cast<CUstream>(earlier));
    EMU_FIND_STREAM(target, static_cast<CUstream>(later));
    emu::RecordPtr record = emu::enqueue(source, {"record", nullptr, nullptr, {}});
    emu::enqueue(target, {"wait", nullptr, record, {}});
    return CUDA_SUCCESS;
}

int emu_current_device() {
    if (emu::forked || !emu::current_context()) return -1;
    return emu::current_context()->device;
}

int emu_physical_device() {
    if (emu::forked || !emu::current_context()) return -1;
    return emu::current_context()->physical;
}

void emu_use_device(int ordinal) { emu::context_stack() = {emu::context_of(ordinal)}; }

int emu_forked() { return emu::forked; }

int emu_noop() { return emu::noop_mode; }

void emu_set_delay(double probability, unsigned max_us, unsigned seed) {
    emu::Lock lock(emu::global_mutex);
    emu::delays.probability = probability;
    emu::delays.max_us = max_us;
    emu::delays.random.seed(seed);
}

int emu_drain(int timeout_ms) {
    if (emu::forked) return 1;
    emu::Lock lock(emu::global_mutex);
    std::vector<emu::RecordPtr> records;
    for (CUstream stream : emu::all_streams)
        if (stream->last) records.push_back(stream->last);
    auto until = emu::Time::now() + std::chrono::milliseconds(timeout_ms);
    for (const auto& record : records)
        if (!emu::some_done.wait_until(lock, until, [&] { return record->done.load(); })) return 0;
    return 1;
}
