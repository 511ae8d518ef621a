// What the emulator found: kept for the test in this process, and in a file for its parent.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_core.h"

namespace {

struct Report {
    std::string kind, text;
};
std::mutex& report_mutex = emu::leaked<std::mutex>();
std::vector<Report>& reports = emu::leaked<std::vector<Report>>();
constexpr size_t kept_reports = 1000;  // a loop with a bug must not fill the memory

void append_to_file(const char* kind, const char* text) {
    const char* folder = getenv("EMU_REPORT_DIR");
    if (!folder || !*folder) return;
    std::string path = std::string(folder) + "/" + std::to_string(getpid());
    std::string line = std::string(kind) + "\t" + text;
    for (char& c : line)
        if (c == '\n') c = '|';  // one line for each report
    line += '\n';
    int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0) return;
    if (write(file, line.data(), line.size()) < 0) fprintf(stderr, "[emucuda] %s", line.c_str());
    close(file);
}

}  // namespace

void emu_report(const char* kind, const char* text) {
    if (emu::forked) return;
    static const bool quiet = getenv("EMU_QUIET") != nullptr;
    emu::Lock lock(report_mutex);
    if (reports.size() >= kept_reports) return;
    reports.push_back({kind, text});
    append_to_file(kind, text);
    if (!quiet) fprintf(stderr, "[emulator] %s: %s\n", kind, text);
}

long emu_report_count(const char* kind) {
    emu::Lock lock(report_mutex);
    long count = 0;
    for (const Report& report : reports) count += !kind || report.kind == kind;
    return count;
}

int emu_report_get(const char* kind, long index, char* text, size_t size) {
    emu::Lock lock(report_mutex);
    for (const Report& report : reports)
        if ((!kind || report.kind == kind) && index-- == 0) {
            std::string whole = kind ? report.text : report.kind + ": " + report.text;
            snprintf(text, size, "%s", whole.c_str());
            return 0;
        }
    return -1;
}

void emu_reset() {
    {
        emu::Lock lock(report_mutex);
        reports.clear();
    }
    emu::race_reset();
    if (!emu::initialised) return;
    for (int device = 0; device < emu::device_count(); device++)
        emu::context_of(device)->sticky = 0;
}
