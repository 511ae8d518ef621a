/* A libnccl.so.2 without GPUs or ranks, for the binding's tests: every call is written down as text, with its
 * arguments as they arrived. Groups, asynchronous progress and late outputs behave as NCCL's do.
 *
 * -DFAKE_VERSION=22703    what ncclGetVersion says
 * -DFAKE_BEFORE_228       without ncclAlltoAll, ncclGather, ncclScatter and ncclCommRevoke
 * -DFAKE_WITHOUT_SHRINK   without ncclCommShrink
 * -DFAKE_NOOP=1           operations return at once, and nothing is written down (to measure the caller)
 */
#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION 23203
#endif
#ifndef FAKE_NOOP
#define FAKE_NOOP 0
#endif

typedef void* Comm;
typedef void* Stream;
typedef struct { char internal[128]; } UniqueId;
enum { success = 0, invalid_argument = 4, invalid_usage = 5, in_progress = 7 };

/* ── controls ── */
static char calls[1 << 20];
static size_t calls_used;
static int next_status = success, polls_left, final_status = success; /* of the next operation, and after it */
static int block_ms;
static int group_depth, group_error, group_calls, submitted;
static Comm* late_output; /* written when progress ends, as ncclCommSplit does */
static volatile int inside;

void fake_reset(void) {
  calls_used = 0;
  calls[0] = 0;
  next_status = success, polls_left = 0, final_status = success, block_ms = 0;
  group_depth = group_error = group_calls = submitted = 0;
  late_output = NULL;
}
const char* fake_calls(void) { return calls; }
int fake_submitted(void) { return submitted; }
int fake_inside(void) { return inside; }
/* The next operation answers `status`; then `polls` polls answer in progress, and the rest `final`. */
void fake_answer(int status, int polls, int final) { next_status = status, polls_left = polls, final_status = final; }
/* The next operation stays inside for so long. */
void fake_block(int milliseconds) { block_ms = milliseconds; }

static void record(const char* format, ...) {
  va_list arguments;
  if (FAKE_NOOP || sizeof calls - calls_used < 4096) return; /* full; no line is longer than that */
  va_start(arguments, format);
  calls_used += (size_t)vsnprintf(calls + calls_used, sizeof calls - calls_used, format, arguments);
  va_end(arguments);
}

static int answer(void) {
  int status = next_status;
  next_status = success;
  if (block_ms) {
    int milliseconds = block_ms;
    block_ms = 0;
    inside = 1;
    usleep((useconds_t)milliseconds * 1000);
    inside = 0;
  }
  return status;
}

/* An operation: in a group its error is the group's, and only ncclGroupEnd submits it. */
static int operation(Comm comm) {
  int status = comm ? answer() : invalid_argument;
  if (group_depth == 0) {
    if (status == success || status == in_progress) ++submitted;
  } else if (status == success) {
    ++group_calls;
  } else {
    group_error = status;
  }
  return status;
}

#define OPERATION(...) \
  record(__VA_ARGS__); \
  return FAKE_NOOP ? success : operation(comm)
#define A(pointer) (unsigned long long)(size_t)(pointer)

/* ── NCCL ── */
/* As in NCCL, some exported functions call others, which another libnccl in the process may have too. */
int fake_version(void) { return FAKE_VERSION; }
int ncclGetVersion(int* version) { *version = fake_version(); return success; }
const char* ncclGetErrorString(int result) { return result == invalid_argument ? "invalid argument" : "some error"; }
const char* ncclGetLastError(Comm comm) { (void)comm; return "the fake's last error"; }
int ncclGetUniqueId(UniqueId* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = (char)(i % 7 ? i : 0);
  record("ncclGetUniqueId\n");
  return answer();
}

static void record_config(const char* config) {
  size_t size = 0;
  if (!config) {
    record(" config NULL\n");
    return;
  }
  memcpy(&size, config, sizeof size);
  record(" config ");
  for (size_t i = 0; i < size; ++i) record("%02x", (unsigned char)config[i]);
  record("\n");
}

int ncclCommInitRankConfig(Comm* comm, int nranks, UniqueId id, int rank, void* config) {
  record("ncclCommInitRankConfig %d %d id ", nranks, rank);
  for (int i = 0; i < 128; ++i) record("%02x", (unsigned char)id.internal[i]);
  record_config(config);
  int status = answer();
  *comm = status == success || status == in_progress ? (Comm)0xC0FFEE0000 : NULL;
  return status;
}
int ncclCommFinalize(Comm comm) { record("ncclCommFinalize %llu\n", A(comm)); return answer(); }
int ncclCommDestroy(Comm comm) { record("ncclCommDestroy %llu\n", A(comm)); return answer(); }
int ncclCommAbort(Comm comm) {
  record("ncclCommAbort %llu%s\n", A(comm), inside ? " WHILE A THREAD IS INSIDE" : "");
  return answer();
}
int ncclCommGetAsyncError(Comm comm, int* status) {
  (void)comm;
  if (polls_left > 0) {
    --polls_left;
    *status = in_progress;
  } else {
    *status = final_status;
    if (late_output) *late_output = (Comm)0xC41D0000, late_output = NULL;
  }
  return success;
}
int ncclCommCount(Comm comm, int* count) { record("ncclCommCount %llu\n", A(comm)); *count = 5; return success; }
int ncclCommCuDevice(Comm comm, int* device) { record("ncclCommCuDevice %llu\n", A(comm)); *device = 6; return success; }
int ncclCommUserRank(Comm comm, int* rank) { record("ncclCommUserRank %llu\n", A(comm)); *rank = 2; return success; }

int ncclCommSplit(Comm comm, int color, int key, Comm* child, void* config) {
  record("ncclCommSplit %llu %d %d", A(comm), color, key);
  record_config(config);
  int status = answer();
  *child = NULL;
  if (color >= 0 && status == in_progress) late_output = child;
  if (color >= 0 && status == success) *child = (Comm)0xC41D0000;
  return status;
}
#ifndef FAKE_WITHOUT_SHRINK
int ncclCommShrink(Comm comm, int* excluded, int count, Comm* child, void* config, int flags) {
  record("ncclCommShrink %llu [", A(comm));
  for (int i = 0; i < count; ++i) record("%d,", excluded[i]), excluded[i] = -1; /* NCCL sorts it in place */
  record("] %d", flags);
  record_config(config);
  int status = answer();
  *child = NULL;
  if (status == in_progress) late_output = child;
  if (status == success) *child = (Comm)0xC41D0000;
  return status;
}
#endif

int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, Comm comm, Stream stream) {
  OPERATION("ncclAllReduce %llu %llu %zu %d %d %llu %llu\n", A(send), A(recv), count, type, op, A(comm), A(stream));
}
int ncclReduce(const void* send, void* recv, size_t count, int type, int op, int root, Comm comm, Stream stream) {
  OPERATION("ncclReduce %llu %llu %zu %d %d %d %llu %llu\n", A(send), A(recv), count, type, op, root, A(comm), A(stream));
}
int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, Comm comm, Stream stream) {
  OPERATION("ncclBroadcast %llu %llu %zu %d %d %llu %llu\n", A(send), A(recv), count, type, root, A(comm), A(stream));
}
int ncclAllGather(const void* send, void* recv, size_t count, int type, Comm comm, Stream stream) {
  OPERATION("ncclAllGather %llu %llu %zu %d %llu %llu\n", A(send), A(recv), count, type, A(comm), A(stream));
}
int ncclReduceScatter(const void* send, void* recv, size_t count, int type, int op, Comm comm, Stream stream) {
  OPERATION("ncclReduceScatter %llu %llu %zu %d %d %llu %llu\n", A(send), A(recv), count, type, op, A(comm), A(stream));
}
int ncclSend(const void* send, size_t count, int type, int peer, Comm comm, Stream stream) {
  OPERATION("ncclSend %llu %zu %d %d %llu %llu\n", A(send), count, type, peer, A(comm), A(stream));
}
int ncclRecv(void* recv, size_t count, int type, int peer, Comm comm, Stream stream) {
  OPERATION("ncclRecv %llu %zu %d %d %llu %llu\n", A(recv), count, type, peer, A(comm), A(stream));
}
#ifndef FAKE_BEFORE_228
int ncclAlltoAll(const void* send, void* recv, size_t count, int type, Comm comm, Stream stream) {
  OPERATION("ncclAlltoAll %llu %llu %zu %d %llu %llu\n", A(send), A(recv), count, type, A(comm), A(stream));
}
int ncclGather(const void* send, void* recv, size_t count, int type, int root, Comm comm, Stream stream) {
  OPERATION("ncclGather %llu %llu %zu %d %d %llu %llu\n", A(send), A(recv), count, type, root, A(comm), A(stream));
}
int ncclScatter(const void* send, void* recv, size_t count, int type, int root, Comm comm, Stream stream) {
  OPERATION("ncclScatter %llu %llu %zu %d %d %llu %llu\n", A(send), A(recv), count, type, root, A(comm), A(stream));
}
int ncclCommRevoke(Comm comm, int flags) { record("ncclCommRevoke %llu %d\n", A(comm), flags); return answer(); }
#endif

int ncclGroupStart(void) { record("ncclGroupStart\n"); ++group_depth; return success; }
static int end_group(int submit) {
  if (group_depth == 0) return invalid_usage;
  if (--group_depth > 0) return success;
  int error = group_error, count = group_calls;
  group_error = group_calls = 0;
  if (error) return error; /* NCCL drops a group of which one call failed */
  if (submit) submitted += count;
  return submit ? answer() : success;
}
int ncclGroupEnd(void) { record("ncclGroupEnd\n"); return end_group(1); }
int ncclGroupSimulateEnd(void* info) {
  float time_us = 12.5f;
  record("ncclGroupSimulateEnd ");
  for (int i = 0; i < 20; ++i) record("%02x", ((unsigned char*)info)[i]);
  record("\n");
  memcpy((char*)info + 16, &time_us, sizeof time_us);
  return end_group(0);
}

int ncclCommRegister(Comm comm, void* buffer, size_t size, void** handle) {
  record("ncclCommRegister %llu %llu %zu\n", A(comm), A(buffer), size);
  *handle = (void*)0x4A4D1E0000;
  return answer();
}
int ncclCommDeregister(Comm comm, void* handle) {
  record("ncclCommDeregister %llu %llu\n", A(comm), A(handle));
  return answer();
}
int ncclCommWindowRegister(Comm comm, void* buffer, size_t size, void** window, int flags) {
  record("ncclCommWindowRegister %llu %llu %zu %d\n", A(comm), A(buffer), size, flags);
  *window = (void*)0x314D030000;
  return answer();
}
int ncclCommWindowDeregister(Comm comm, void* window) {
  record("ncclCommWindowDeregister %llu %llu\n", A(comm), A(window));
  return answer();
}
int ncclMemAlloc(void** pointer, size_t size) {
  record("ncclMemAlloc %zu\n", size);
  *pointer = (void*)0x3E30000000;
  return answer();
}
int ncclMemFree(void* pointer) { record("ncclMemFree %llu\n", A(pointer)); return answer(); }
int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, Comm comm) {
  static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  record("ncclRedOpCreatePreMulSum ");
  for (int i = 0; i < sizes[type]; ++i) record("%02x", ((unsigned char*)scalar)[i]);
  record(" %d %d %llu\n", type, residence, A(comm));
  *op = 5;
  return answer();
}
int ncclRedOpDestroy(int op, Comm comm) { record("ncclRedOpDestroy %d %llu\n", op, A(comm)); return answer(); }
