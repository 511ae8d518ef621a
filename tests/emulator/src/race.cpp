// The happens-before race check.
//
// CUDA fixes the order of operations when they are enqueued, so whether two accesses are ordered
// is known from the vector clocks alone, whatever the timing was: a bug is reported even in a run
// whose answer happened to be right.
//
// Accesses are entered when an operation runs (its worker calls race_access before it marks the
// record as done). They therefore arrive in an order that agrees with happens-before, and that is
// what makes pruning sound: when a write W enters, every access ordered before W can be dropped,
// because whatever enters later and is unordered with the dropped one is unordered with W too.
#include <algorithm>
#include <cstdio>

#include "cuda_core.h"

namespace emu {

std::atomic<bool> race_enabled{false};

namespace {

struct Entry {
    RecordPtr record;
    int access;
};
struct Node {  // the accesses of [key, end) that no later one supersedes
    uintptr_t end;
    std::vector<Entry> entries;
};
using Shadow = std::map<uintptr_t, Node>;

std::mutex& shadow_mutex = leaked<std::mutex>();
Shadow& shadow = leaked<Shadow>();

bool happens_before(const Record& a, const Record& b) {
    return a.stream < b.clock.size() && b.clock[a.stream] >= a.tick;
}

bool conflicting(int a, int b) {
    if (a == EMU_ATOMIC && b == EMU_ATOMIC) return false;
    return a != EMU_READ || b != EMU_READ;
}

void split_at(uintptr_t address) {
    auto it = shadow.upper_bound(address);
    if (it == shadow.begin()) return;
    --it;
    if (it->first < address && address < it->second.end) {
        Node right = it->second;
        it->second.end = address;
        shadow.emplace(address, std::move(right));
    }
}

std::string describe(const Record& record, int access) {
    static const char* const names[] = {"read", "write", "atomic"};
    std::string where = record.stream ? "stream " + std::to_string(record.stream) : "host";
    return std::string(names[access]) + " by '" + record.label + "' (" + where + ", #" +
           std::to_string(record.tick) + ")";
}

// The history of one node after `record` has accessed it; conflicts go to `found`.
void add_access(Node& node, const RecordPtr& record, int access, std::vector<Entry>& found) {
    std::vector<Entry> kept;
    bool already = false;
    for (Entry& old : node.entries) {
        if (old.record == record) {
            already = already || old.access == access;
            kept.push_back(old);
            continue;
        }
        bool before = happens_before(*old.record, *record);
        if (conflicting(old.access, access) && !before && !happens_before(*record, *old.record))
            found.push_back(old);
        bool superseded = before && (access == EMU_WRITE ||
                                     (access == EMU_READ && old.access == EMU_READ &&
                                      old.record->stream == record->stream));
        if (!superseded) kept.push_back(old);
    }
    if (!already) kept.push_back({record, access});
    node.entries.swap(kept);
}

}  // namespace

void join(VectorClock& into, const VectorClock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

void race_access(const RecordPtr& record, uintptr_t begin, size_t bytes, int access) {
    if (!race_enabled || bytes == 0) return;
    std::vector<std::string> texts;
    {
        Lock lock(shadow_mutex);
        uintptr_t end = begin + bytes;
        split_at(begin);
        split_at(end);
        std::set<std::pair<Record*, int>> reported;  // once for each pair of operations
        auto it = shadow.lower_bound(begin);
        for (uintptr_t at = begin; at < end; ++it) {
            if (it == shadow.end() || it->first > at) {  // a gap: memory not accessed so far
                uintptr_t stop = it == shadow.end() ? end : std::min(end, it->first);
                it = shadow.emplace(at, Node{stop, {}}).first;
            }
            std::vector<Entry> found;
            add_access(it->second, record, access, found);
            for (const Entry& old : found) {
                if (!reported.insert({old.record.get(), old.access}).second) continue;
                char where[64];
                snprintf(where, sizeof where, "[%#zx, +%zu): ", static_cast<size_t>(at),
                         static_cast<size_t>(it->second.end - at));
                texts.push_back(std::string("unordered accesses of ") + where +
                                describe(*old.record, old.access) + " and " +
                                describe(*record, access));
            }
            at = it->second.end;
        }
    }
    for (const std::string& text : texts) emu_report("race", text.c_str());
}

void race_forget(uintptr_t begin, size_t bytes) {
    Lock lock(shadow_mutex);
    split_at(begin);
    split_at(begin + bytes);
    shadow.erase(shadow.lower_bound(begin), shadow.lower_bound(begin + bytes));
}

void race_reset() {
    Lock lock(shadow_mutex);
    shadow.clear();
}

}  // namespace emu

void emu_race_enable(int on) { emu::race_enabled = on != 0; }

void emu_race_forget(const void* ptr, size_t bytes) {
    emu::race_forget(reinterpret_cast<uintptr_t>(ptr), bytes);
}

void emu_host_access(const void* ptr, size_t bytes, int access, const char* label) {
    if (emu::forked) return;
    auto record = std::make_shared<emu::Record>();
    {
        emu::Lock lock(emu::global_mutex);
        record->label = label;
        record->tick = emu::host_clock[0];
        record->clock = emu::host_clock;
        if (const auto& running = emu::running_record()) emu::join(record->clock, running->clock);
        record->done = true;
    }
    emu::race_access(record, reinterpret_cast<uintptr_t>(ptr), bytes, access);
}
