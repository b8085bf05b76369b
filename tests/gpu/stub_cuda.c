/* libcuda.so.1 without a device: the calls that our driver makes, on memory of this process. Kernels compute nothing.
 *
 * Strict where the real library is, and where it would only now and then go wrong: whatever is refused is told by
 * stub_refused(). Work on a stream is done when somebody waits for it and not before, so that who reads too early, or
 * reuses a pinned buffer or gives memory back under way, is seen. Types and sizes are CUDA's, names of its calls too.
 *
 * Settings: STUB_CUDA_CAPABILITY (90), _VERSION (13000), _DEVICES (1), _PEERS (1: they reach each other), _MEMORY
 * (bytes, 1 GiB), and _FAIL: NAME:N:CODE,...
 * makes the N-th call of NAME fail; NAME "kernel" is the N-th kernel that runs, of which the next wait tells.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    PEER_UNSUPPORTED = 217,
    INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, DESTROYED = 709,
    NOT_CAPTURABLE = 900, INVALIDATED = 901, CAPTURED_EVENT = 907, MOST = 64
};
enum kind { MEMORY = 1, PINNED, STREAM, EVENT, MODULE, FUNCTION, GRAPH, READY, PEER, KINDS };
enum what { COPY, SET, KERNEL, MARK };

struct op {
    enum what what;
    uintptr_t to, from;
    size_t bytes, rows, pitch_to, pitch_from;
    struct thing *of; /* function or event */
    unsigned grid[3], block, shared;
    int beside; /* whether a kernel may begin beside the one in front */
    unsigned char params[8 * MOST];
};

struct thing { /* whatever has a handle: its own address, or where its memory begins */
    enum kind kind;
    uintptr_t at;
    size_t size; /* bytes of memory, or operations */
    struct op *ops;
    int capturing, invalid, mode, flags, waiting; /* waiting: marks of an event that nothing has passed */
    struct thing *module;
    char name[128];
    unsigned threads, count, sizes[MOST], offsets[MOST], fixed_shared, most_shared;
    char *image;
    struct thing *next;
};

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct thing *things;
static int begun, dead, retained, generation = 1;
static __thread int current;
static size_t taken;
static char refused[4096], calls_of[128][40], fails_of[16][40];
static long waits, besides, calls[128], fails_at[16];
static int fails[16], fail_count = -1;
static char **launches;
static size_t launch_count;

static void unlock(int *held) { (void)held; pthread_mutex_unlock(&mutex); }

static long setting(const char *name, long otherwise) {
    const char *told = getenv(name);
    return told && *told ? atol(told) : otherwise;
}

static int refuse(int code, const char *why, ...) {
    char line[256];
    va_list rest;
    va_start(rest, why);
    vsnprintf(line, sizeof line, why, rest);
    va_end(rest);
    if (strlen(refused) + strlen(line) + 2 < sizeof refused) strcat(strcat(refused, line), "\n");
    fprintf(stderr, "stub_cuda: %s\n", line);
    return code;
}

static int planned(const char *name) { /* the error that this call is to have */
    if (fail_count < 0) {
        char *told = strdup(getenv("STUB_CUDA_FAIL") ? getenv("STUB_CUDA_FAIL") : ""), *rest = told, *one;
        for (fail_count = 0; (one = strsep(&rest, ",")) && *one && fail_count < 16; fail_count++)
            if (sscanf(one, "%39[^:]:%ld:%d", fails_of[fail_count], &fails_at[fail_count], &fails[fail_count]) != 3) abort();
        free(told);
    }
    for (int i = 0; i < fail_count; i++)
        if (!strcmp(name, fails_of[i]) && --fails_at[i] == 0) return fails[i];
    return 0;
}

static void count_call(const char *name) {
    int i = 0;
    while (calls_of[i][0] && strcmp(calls_of[i], name)) i++;
    strcpy(calls_of[i], name);
    calls[i]++;
}

enum { MAPPED = 2 }; /* of pinned memory: kernels may have its address */
enum { ANYWHERE, INITIALISED, IN_CONTEXT };
static int enter(const char *name, int needs) {
    count_call(name);
    int failed = planned(name);
    if (failed >= 700 && failed < 720) dead = failed; /* of such a fault no call recovers */
    if (failed) return failed;
    if (needs != ANYWHERE && !begun) return refuse(NOT_INITIALIZED, "%s before cuInit", name);
    if (needs == IN_CONTEXT && !current) return refuse(INVALID_CONTEXT, "%s in a thread without a context", name);
    if (needs == IN_CONTEXT && current != generation) return refuse(DESTROYED, "%s in a context that is gone", name);
    return needs == IN_CONTEXT ? dead : 0;
}
#define ENTER(needs)                                                        \
    int held __attribute__((cleanup(unlock))) = pthread_mutex_lock(&mutex); \
    int failed = enter(__func__, needs);                                    \
    if (failed) return failed

static struct thing *make(enum kind kind) {
    struct thing *one = calloc(1, sizeof *one);
    one->kind = kind, one->at = (uintptr_t)one, one->next = things;
    return things = one;
}
static struct thing *find(const void *handle, enum kind kind) {
    for (struct thing *one = things; one; one = one->next)
        if (one->at == (uintptr_t)handle && one->kind == kind) return one;
    return NULL;
}
static struct thing *within(uintptr_t at, size_t bytes, enum kind kind) {
    for (struct thing *one = things; one; one = one->next)
        if (one->kind == kind && at >= one->at && at + bytes <= one->at + one->size) return one;
    return NULL;
}
static void drop(struct thing *gone) {
    for (struct thing **link = &things; *link; link = &(*link)->next)
        if (*link == gone) {
            *link = gone->next;
            break;
        }
    if (gone->kind == MEMORY) taken -= gone->size;
    if (gone->kind == MEMORY || gone->kind == PINNED || gone->kind == PEER) munmap((void *)gone->at, gone->size);
    free(gone->image);
    free(gone->ops);
    free(gone);
}
#define FIND(one, handle, kind)                                                 \
    struct thing *one = find(handle, kind);                                     \
    if (!one) return refuse(INVALID_HANDLE, "%s: no such %s", __func__, #kind)

/* -- tensor maps ---------------------------------------------------------------------------------------------------- */
enum { MAP = 128, MAP_ALIGNED = 64 };
struct map { char magic[8]; uintptr_t at; size_t bytes; char rest[MAP - 24]; }; /* CUtensorMap, as nobody else reads it */

/* -- work ---------------------------------------------------------------------------------------------------------- */
static size_t span(const struct op *op, size_t pitch) { return op->rows ? (op->rows - 1) * pitch + op->bytes : 0; }

static int uses(const struct op *op, const struct thing *one) {
    uintptr_t end = one->at + one->size;
    if (op->what == KERNEL) {
        if (one == op->of->module) return 1;
        for (unsigned i = 0; i < op->of->count; i++) {
            uintptr_t at = 0;
            memcpy(&at, op->params + 8 * i, 8);
            if (op->of->sizes[i] >= 8 && at >= one->at && at < end) return 1;
        }
        return 0;
    }
    return op->what != MARK && ((op->to >= one->at && op->to < end) || (op->from >= one->at && op->from < end));
}

static int under_way(const struct thing *one) {
    for (struct thing *stream = things; stream; stream = stream->next)
        for (size_t i = 0; stream->kind == STREAM && !stream->capturing && i < stream->size; i++)
            if (uses(&stream->ops[i], one)) return 1;
    return 0;
}

static int there(const struct op *op) { /* whether what it uses is memory that is held */
    if (op->what == MARK) return 1;
    if (op->what != KERNEL) {
        size_t to = span(op, op->pitch_to), from = span(op, op->pitch_from);
        int wrote = within(op->to, to, MEMORY) || within(op->to, to, PINNED);
        return wrote && (op->what == SET || within(op->from, from, MEMORY) || within(op->from, from, PINNED));
    }
    for (unsigned i = 0; i < op->of->count; i++) {
        uintptr_t at = 0;
        memcpy(&at, op->params + 8 * i, 8);
        struct thing *pinned = within(at, 1, PINNED);
        if (op->of->sizes[i] >= 8 && at && !within(at, 1, MEMORY) && !(pinned && pinned->flags & MAPPED)) return 0;
    }
    return 1;
}

static void run(const struct op *op) {
    if (dead) return;
    if (!there(op)) {
        dead = refuse(ILLEGAL_ADDRESS, "work on memory that is gone");
        return;
    }
    if (op->what == MARK) op->of->waiting--;
    for (size_t row = 0; op->what == COPY && row < op->rows; row++)
        memcpy((char *)op->to + row * op->pitch_to, (char *)op->from + row * op->pitch_from, op->bytes);
    if (op->what == SET) memset((void *)op->to, (int)op->from, op->bytes);
    if (op->what != KERNEL) return;
    int failed = planned("kernel");
    if (failed) dead = failed;
    char text[256 + 17 * MOST];
    int n = snprintf(text, sizeof text, "%s %u %u %u %u %u", op->of->name, op->grid[0], op->grid[1], op->grid[2], op->block,
                     op->shared);
    for (unsigned i = 0; i < op->of->count; i++) {
        unsigned long long value = 0;
        memcpy(&value, op->params + 8 * i, op->of->sizes[i] > 8 ? 8 : op->of->sizes[i]);
        n += snprintf(text + n, sizeof text - n, " %llx", value);
    }
    launches = realloc(launches, (launch_count + 1) * sizeof *launches);
    launches[launch_count++] = strdup(text);
    besides += op->beside;
}

static int finish(struct thing *stream, size_t upto) {
    waits += upto > 0;
    for (size_t i = 0; i < upto; i++) run(&stream->ops[i]);
    memmove(stream->ops, stream->ops + upto, (stream->size - upto) * sizeof *stream->ops);
    stream->size -= upto;
    return dead;
}

static int add(const char *name, void *handle, const struct op *op) {
    struct thing *stream = find(handle, STREAM);
    if (!stream) return refuse(INVALID_HANDLE, "%s: no such stream", name);
    if (stream->invalid) return INVALIDATED;
    if (!there(op)) return refuse(INVALID_VALUE, "%s: not within an allocation", name);
    stream->ops = realloc(stream->ops, (stream->size + 1) * sizeof *op);
    stream->ops[stream->size++] = *op;
    return 0;
}

static int not_capturing(const char *name, int relaxed) { /* of calls that a capture must not see */
    for (struct thing *one = things; one; one = one->next)
        if (one->kind == STREAM && one->capturing && !(relaxed && one->mode == 2)) {
            one->invalid = 1;
            return refuse(NOT_CAPTURABLE, "%s while a stream is capturing", name);
        }
    return 0;
}

/* -- device, context ----------------------------------------------------------------------------------------------- */
static int cuInit(unsigned flags) {
    ENTER(ANYWHERE);
    if (!setting("STUB_CUDA_DEVICES", 1)) return NO_DEVICE;
    begun = 1;
    return flags ? INVALID_VALUE : 0;
}
static int cuDriverGetVersion(int *out) {
    ENTER(ANYWHERE);
    *out = (int)setting("STUB_CUDA_VERSION", 13000);
    return 0;
}
static int cuDeviceGetCount(int *out) {
    ENTER(INITIALISED);
    *out = (int)setting("STUB_CUDA_DEVICES", 1);
    return 0;
}
static int cuDeviceGet(int *out, int ordinal) {
    ENTER(INITIALISED);
    if (ordinal < 0 || ordinal >= setting("STUB_CUDA_DEVICES", 1)) return refuse(INVALID_DEVICE, "device %d", ordinal);
    *out = ordinal;
    return 0;
}
static int cuDeviceGetName(char *out, int bytes, int device) {
    ENTER(INITIALISED);
    snprintf(out, (size_t)bytes, "Stub %d", device);
    return 0;
}
static unsigned most_shared(void) { /* of a block, when asked for: technical specifications by compute capability */
    long capability = setting("STUB_CUDA_CAPABILITY", 90);
    return 1024 * (capability == 80 || capability == 87 ? 163 : capability / 10 == 9 || capability / 10 == 10 ? 227 : 99);
}
static int cuDeviceGetAttribute(int *out, int attribute, int device) {
    ENTER(INITIALISED);
    int capability = (int)setting("STUB_CUDA_CAPABILITY", 90);
    if (attribute == 16) return *out = 132, 0; /* multiprocessors */
    if (attribute != 75 && attribute != 76 && attribute != 97) return refuse(INVALID_VALUE, "attribute %d", attribute);
    *out = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : (int)most_shared();
    return device >= setting("STUB_CUDA_DEVICES", 1) ? refuse(INVALID_DEVICE, "device %d", device) : 0;
}
static int cuDeviceCanAccessPeer(int *out, int device, int peer) {
    ENTER(INITIALISED);
    long devices = setting("STUB_CUDA_DEVICES", 1);
    if (device >= devices || peer >= devices) return refuse(INVALID_DEVICE, "devices %d, %d", device, peer);
    *out = device != peer && setting("STUB_CUDA_PEERS", 1);
    return 0;
}
static int device_of; /* the one whose context is retained: a process has one */
static int cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER(INITIALISED);
    if (device >= setting("STUB_CUDA_DEVICES", 1) || (retained && device != device_of))
        return refuse(INVALID_DEVICE, "device %d", device);
    retained++, device_of = device;
    *out = &generation;
    return 0;
}
static void end_context(void) {
    while (things) drop(things);
    generation++, dead = 0;
}
static int cuDevicePrimaryCtxRelease(int device) {
    ENTER(INITIALISED);
    if (device != device_of || !retained) return refuse(INVALID_CONTEXT, "a context that nobody retains");
    if (--retained == 0) end_context();
    return 0;
}
static int cuDevicePrimaryCtxReset(int device) {
    ENTER(INITIALISED);
    end_context();
    return device;
}
static int cuCtxSetCurrent(void *context) {
    ENTER(INITIALISED);
    if (context && (context != &generation || !retained)) return refuse(INVALID_CONTEXT, "no such context");
    current = context ? generation : 0;
    return 0;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */
static size_t total(void) { return (size_t)setting("STUB_CUDA_MEMORY", 1L << 30); }

static int cuMemGetInfo(size_t *free_bytes, size_t *all) {
    ENTER(IN_CONTEXT);
    *all = total(), *free_bytes = total() - taken;
    return 0;
}
static int take(uintptr_t *out, size_t bytes, enum kind kind) {
    if (!bytes) return refuse(INVALID_VALUE, "no bytes of memory");
    if (kind == MEMORY && bytes > total() - taken) return OUT_OF_MEMORY;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    struct thing *one = make(kind);
    one->at = *out = (uintptr_t)at, one->size = bytes;
    taken += kind == MEMORY ? bytes : 0;
    return 0;
}
static int give(const char *name, uintptr_t at, enum kind kind) {
    struct thing *one = find((void *)at, kind);
    if (!one) return refuse(INVALID_VALUE, "%s of what is no allocation", name);
    if (under_way(one)) return refuse(INVALID_VALUE, "%s of memory that is in use", name);
    drop(one);
    return 0;
}
static int cuMemAlloc(uintptr_t *out, size_t bytes) {
    ENTER(IN_CONTEXT);
    failed = not_capturing(__func__, 1);
    return failed ? failed : take(out, bytes, MEMORY);
}
static int cuMemFree(uintptr_t at) {
    ENTER(IN_CONTEXT);
    failed = not_capturing(__func__, 1);
    return failed ? failed : give(__func__, at, MEMORY);
}
static int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
    ENTER(IN_CONTEXT);
    failed = not_capturing(__func__, 1);
    if (flags & ~MAPPED) return refuse(INVALID_VALUE, "flags %u", flags);
    failed = failed ? failed : take((uintptr_t *)out, bytes, PINNED);
    if (!failed) find(*out, PINNED)->flags = (int)flags;
    return failed;
}
static int cuMemFreeHost(void *at) {
    ENTER(IN_CONTEXT);
    failed = not_capturing(__func__, 1);
    return failed ? failed : give(__func__, (uintptr_t)at, PINNED);
}
/* Memory of another process: what lies there nobody sees. Handles are CUDA's in size, and given by value. */
struct ipc { int pid, device; uintptr_t at; size_t bytes; char rest[40]; };

static int cuIpcGetMemHandle(struct ipc *out, uintptr_t at) {
    ENTER(IN_CONTEXT);
    struct thing *one = find((void *)at, MEMORY);
    if (!one) return refuse(INVALID_VALUE, "%s of what is no allocation", __func__);
    if (one->size % (2 << 20)) return refuse(INVALID_VALUE, "%s: %zu bytes share a page with others", __func__, one->size);
    *out = (struct ipc){getpid(), device_of, at, one->size, {0}};
    return 0;
}
static int cuIpcOpenMemHandle(uintptr_t *out, struct ipc handle, unsigned flags) {
    ENTER(IN_CONTEXT);
    failed = not_capturing(__func__, 0);
    if (failed) return failed;
    if (handle.pid == getpid()) return refuse(INVALID_CONTEXT, "%s in the process that made it", __func__);
    if (flags != 1) return refuse(INVALID_VALUE, "%s: flags %u", __func__, flags);
    if (handle.pid <= 0 || !handle.at || handle.bytes % (2 << 20)) return refuse(INVALID_HANDLE, "%s: no handle", __func__);
    if (handle.device != device_of && !setting("STUB_CUDA_PEERS", 1)) return refuse(PEER_UNSUPPORTED, "%s", __func__);
    void *at = mmap(NULL, handle.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct thing *one = make(PEER);
    one->at = *out = (uintptr_t)at, one->size = handle.bytes;
    return 0;
}
static int cuIpcCloseMemHandle(uintptr_t at) {
    ENTER(IN_CONTEXT);
    FIND(one, (void *)at, PEER);
    drop(one);
    return 0;
}
/* host: 0 or 1 where `to` or `from` is the host's, 2 within the device. What is not pinned is copied before the call ends. */
static int copy(const char *name, uintptr_t to, uintptr_t from, size_t bytes, void *handle, int host) {
    struct op op = {.what = COPY, .to = to, .from = from, .bytes = bytes, .rows = 1};
    uintptr_t ends[2] = {to, from};
    if (!bytes) return 0;
    for (int side = 0; side < 2; side++)
        if (side != host && !within(ends[side], bytes, MEMORY)) return refuse(INVALID_VALUE, "%s: not of the device", name);
    if (host == 2 || within(ends[host], bytes, PINNED)) return add(name, handle, &op);
    struct thing *stream = find(handle, STREAM);
    if (!stream) return refuse(INVALID_HANDLE, "%s: no such stream", name);
    if (stream->capturing) return stream->invalid = 1, refuse(NOT_CAPTURABLE, "%s: not pinned", name);
    if (finish(stream, stream->size)) return dead;
    memcpy((void *)to, (void *)from, bytes);
    return 0;
}
static int cuMemcpyHtoDAsync(uintptr_t to, void *from, size_t bytes, void *stream) {
    ENTER(IN_CONTEXT);
    return copy(__func__, to, (uintptr_t)from, bytes, stream, 1);
}
static int cuMemcpyDtoHAsync(void *to, uintptr_t from, size_t bytes, void *stream) {
    ENTER(IN_CONTEXT);
    return copy(__func__, (uintptr_t)to, from, bytes, stream, 0);
}
static int cuMemcpyDtoDAsync(uintptr_t to, uintptr_t from, size_t bytes, void *stream) {
    ENTER(IN_CONTEXT);
    return copy(__func__, to, from, bytes, stream, 2);
}
static int anywhere(uintptr_t at, size_t bytes) {
    return within(at, bytes, MEMORY) || within(at, bytes, PINNED);
}
struct side { size_t x, y; int type; void *host; uintptr_t device; void *array; size_t pitch; };
struct copy2d { struct side from, to; size_t width, height; }; /* CUDA_MEMCPY2D */
static int cuMemcpy2DAsync(const struct copy2d *told, void *stream) {
    ENTER(IN_CONTEXT);
    const struct side *to = &told->to, *from = &told->from;
    struct op op = {.what = COPY, .to = to->device, .from = from->device, .bytes = told->width, .rows = told->height,
                    .pitch_to = to->pitch, .pitch_from = from->pitch};
    if ((to->type != 2 || from->type != 2) && (to->type != 4 || from->type != 4 || !anywhere(to->device, told->width) ||
                                               !anywhere(from->device, told->width)))
        return refuse(INVALID_VALUE, "%s: neither within the device nor between it and pinned memory", __func__);
    if (to->x || to->y || from->x || from->y || to->array || from->array)
        return refuse(INVALID_VALUE, "%s: not of an address", __func__);
    /* the real limit of a pitch is an attribute of the device: 2 GB less one on every one so far */
    if (told->width > to->pitch || told->width > from->pitch || to->pitch > 0x7fffffff || from->pitch > 0x7fffffff)
        return refuse(INVALID_VALUE, "%s: %zu bytes with pitches of %zu and %zu", __func__, told->width, to->pitch, from->pitch);
    return told->width && told->height ? add(__func__, stream, &op) : 0;
}
static int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, void *stream) {
    ENTER(IN_CONTEXT);
    struct op op = {.what = SET, .to = to, .from = value, .bytes = bytes, .rows = 1};
    if (!within(to, bytes, MEMORY)) return refuse(INVALID_VALUE, "%s: not of the device", __func__);
    return bytes ? add(__func__, stream, &op) : 0;
}

/* -- streams, events ----------------------------------------------------------------------------------------------- */
static int cuStreamCreate(void **out, unsigned flags) {
    ENTER(IN_CONTEXT);
    *out = make(STREAM);
    return flags > 1 ? refuse(INVALID_VALUE, "flags %u", flags) : 0;
}
static int cuStreamSynchronize(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(stream, handle, STREAM);
    if (stream->capturing) return not_capturing(__func__, 0);
    return finish(stream, stream->size);
}
static int cuStreamDestroy(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(stream, handle, STREAM);
    if (!stream->capturing) finish(stream, stream->size);
    drop(stream);
    return dead;
}
static int cuEventCreate(void **out, unsigned flags) {
    ENTER(IN_CONTEXT);
    struct thing *event = make(EVENT);
    event->flags = (int)flags, *out = event;
    return flags & ~7u ? refuse(INVALID_VALUE, "flags %u", flags) : 0;
}
static int cuEventRecord(void *handle, void *on) {
    ENTER(IN_CONTEXT);
    FIND(event, handle, EVENT);
    FIND(stream, on, STREAM);
    struct op op = {.what = MARK, .of = event};
    event->capturing = stream->capturing;
    if (stream->capturing) return stream->invalid ? INVALIDATED : 0;
    event->waiting++;
    return add(__func__, on, &op);
}
static int cuEventSynchronize(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(event, handle, EVENT);
    if (event->capturing) return refuse(CAPTURED_EVENT, "%s of what was captured", __func__);
    for (struct thing *one = things; one; one = one->next)
        for (size_t last = one->size; one->kind == STREAM && !one->capturing && event->waiting && last; last--)
            if (one->ops[last - 1].of == event && one->ops[last - 1].what == MARK) finish(one, last);
    return dead;
}
static int cuEventElapsedTime(float *out, void *begin, void *end) {
    ENTER(IN_CONTEXT);
    FIND(first, begin, EVENT);
    FIND(second, end, EVENT);
    *out = 0.001f;
    return (first->flags | second->flags) & 2 ? refuse(INVALID_HANDLE, "%s of events without times", __func__) : 0;
}
static int cuEventDestroy(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(event, handle, EVENT);
    if (event->waiting) return refuse(INVALID_VALUE, "%s of one that is waited for", __func__);
    drop(event);
    return 0;
}

/* -- modules ------------------------------------------------------------------------------------------------------- */
static const char *section(const char *image, const char *prefix, const char *name, const Elf64_Shdr **found) {
    const Elf64_Ehdr *head = (const void *)image;
    const Elf64_Shdr *all = (const void *)(image + head->e_shoff);
    char wanted[192];
    snprintf(wanted, sizeof wanted, "%s%s", prefix, name);
    for (int i = 0; i < head->e_shnum; i++)
        if (!strcmp(image + all[head->e_shstrndx].sh_offset + all[i].sh_name, wanted)) {
            *found = &all[i];
            return image + all[i].sh_offset;
        }
    return NULL;
}
static int of_cubin(struct thing *function, const char *image) { /* sizes of parameters are told in .nv.info.NAME */
    const Elf64_Shdr *here;
    if (!section(image, ".text.", function->name, &here)) return NOT_FOUND;
    const unsigned char *told = (const void *)section(image, ".nv.info.", function->name, &here), *end = told + here->sh_size;
    if (section(image, ".nv.shared.", function->name, &here)) {
        /* from sm_90 on with 1 KB for the system, which is within what a block cannot have anyway */
        unsigned reserved = setting("STUB_CUDA_CAPABILITY", 90) >= 90 ? 1024 : 0, told_size = (unsigned)here->sh_size;
        function->fixed_shared = told_size > reserved ? told_size - reserved : 0;
    }
    for (uint32_t word[3]; told < end; told += told[0] == 4 ? 4 + told[2] + 256 * told[3] : 4) {
        memcpy(word, told + 4, 12);
        if (told[0] == 4 && told[1] == 0x17) { /* index, ordinal and offset, flags with the size from bit 18 on */
            unsigned ordinal = word[1] & 0xffff;
            if (ordinal >= MOST) abort();
            function->offsets[ordinal] = word[1] >> 16, function->sizes[ordinal] = word[2] >> 18;
            function->count = ordinal + 1 > function->count ? ordinal + 1 : function->count;
        }
        if (told[0] == 4 && told[1] == 0x10) function->threads = word[0] * word[1] * word[2]; /* .reqntid */
    }
    return 0;
}
static int of_ptx(struct thing *function, const char *text) {
    char wanted[160];
    snprintf(wanted, sizeof wanted, ".entry %s(", function->name);
    const char *at = strstr(text, wanted), *end = at ? strchr(at + strlen(wanted), ')') : NULL;
    if (!end) return NOT_FOUND;
    while ((at = strstr(at, ".param .")) && at < end) {
        at += 8;
        int map = !strncmp(at, "align", 5);
        function->sizes[function->count++] = map ? MAP : (unsigned)atoi(at + 1) / 8; /* u64, b32, f32 */
    }
    sscanf(end, ") .reqntid %u", &function->threads);
    return 0;
}
static int cuModuleLoadData(void **out, const char *image) {
    ENTER(IN_CONTEXT);
    failed = not_capturing(__func__, 1);
    if (failed) return failed;
    long capability = setting("STUB_CUDA_CAPABILITY", 90), target = 0;
    size_t bytes = strlen(image) + 1;
    if (!memcmp(image, ELFMAG, SELFMAG)) {
        const Elf64_Ehdr *head = (const void *)image;
        bytes = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
        if (head->e_phoff + (size_t)head->e_phnum * head->e_phentsize > bytes)
            bytes = head->e_phoff + (size_t)head->e_phnum * head->e_phentsize;
        target = head->e_ident[EI_ABIVERSION] >= 8 ? head->e_flags >> 8 & 0xff : head->e_flags & 0xff;
        if (target / 10 != capability / 10 || target > capability) return refuse(NO_BINARY, "sm_%ld on %ld", target, capability);
    } else {
        const char *told = strstr(image, ".target sm_");
        if (!told) return refuse(INVALID_IMAGE, "no module");
        target = atol(told + 11);
        if (target > capability) return refuse(NO_BINARY, "PTX of sm_%ld on %ld", target, capability);
    }
    struct thing *module = make(MODULE);
    module->image = memcpy(malloc(bytes), image, bytes), *out = module;
    return 0;
}
static int cuModuleGetFunction(void **out, void *handle, const char *name) {
    ENTER(IN_CONTEXT);
    FIND(module, handle, MODULE);
    struct thing *function = make(FUNCTION);
    snprintf(function->name, sizeof function->name, "%s", name);
    function->module = module, function->most_shared = 48 << 10, *out = function;
    int wrong = memcmp(module->image, ELFMAG, SELFMAG) ? of_ptx(function, module->image) : of_cubin(function, module->image);
    return wrong ? refuse(wrong, "%s is in no module", name) : 0;
}
static int cuModuleUnload(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(module, handle, MODULE);
    if (under_way(module)) return refuse(INVALID_VALUE, "%s of what is in use", __func__);
    for (struct thing *one = things, *next; one; one = next) {
        next = one->next;
        if (one->module == module) drop(one);
    }
    drop(module);
    return 0;
}
static int cuFuncSetAttribute(void *handle, int attribute, int value) {
    ENTER(IN_CONTEXT);
    FIND(function, handle, FUNCTION);
    if (attribute != 8 || value < 0 || (unsigned)value + function->fixed_shared > most_shared())
        return refuse(INVALID_VALUE, "%s: attribute %d = %d of %s", __func__, attribute, value, function->name);
    function->most_shared = (unsigned)value;
    return 0;
}
static int start(const char *name, void *handle, const unsigned grid[3], unsigned block, unsigned shared, void *stream,
                 void **params, void **extra, int beside) {
    struct thing *function = find(handle, FUNCTION);
    if (!function) return refuse(INVALID_HANDLE, "%s: no such FUNCTION", name);
    struct op op = {.what = KERNEL, .of = function, .grid = {grid[0], grid[1], grid[2]}, .block = block, .shared = shared,
                    .beside = beside};
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
        return refuse(INVALID_VALUE, "%s: a grid of %u, %u, %u", function->name, grid[0], grid[1], grid[2]);
    if (!op.block || op.block > 1024 || (function->threads && op.block != function->threads))
        return refuse(INVALID_VALUE, "%s: %u threads, not %u", function->name, op.block, function->threads);
    if (shared + function->fixed_shared > function->most_shared)
        return refuse(INVALID_VALUE, "%s: %u bytes of shared memory", function->name, shared);
    if (extra || (!params && function->count)) return refuse(INVALID_VALUE, "%s: no parameters", function->name);
    for (unsigned i = 0; i < function->count; i++) {
        if (!params[i]) return refuse(INVALID_VALUE, "%s: no parameter %u", function->name, i);
        if (function->sizes[i] != MAP) {
            memcpy(op.params + 8 * i, params[i], function->sizes[i]);
            continue;
        }
        const struct map *map = params[i];
        if ((uintptr_t)map % MAP_ALIGNED || memcmp(map->magic, "tensor", 7))
            return refuse(INVALID_VALUE, "%s: parameter %u is no tensor map", function->name, i);
        if (!within(map->at, map->bytes, MEMORY)) return refuse(INVALID_VALUE, "%s: a tensor map of what is gone", function->name);
        memcpy(op.params + 8 * i, &map->at, 8);
    }
    if (!there(&op)) return refuse(INVALID_VALUE, "%s: an address that is not of the device", function->name);
    return add(name, stream, &op);
}
static int cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **params, void **extra) {
    ENTER(IN_CONTEXT);
    return start(__func__, handle, (unsigned[]){x, y, z}, bx * by * bz, shared, stream, params, extra, 0);
}
static int waits_itself(const char *image) { /* only PTX can be read */
    return !memcmp(image, ELFMAG, SELFMAG) || strstr(image, "griddepcontrol.wait");
}
struct attribute { int id; char pad[4]; unsigned value[3]; char rest[52]; }; /* CUlaunchAttribute */
struct config { unsigned grid[3], block[3], shared; void *stream; const struct attribute *attributes; unsigned count; };
static int cuLaunchKernelEx(const struct config *told, void *handle, void **params, void **extra) {
    ENTER(IN_CONTEXT);
    FIND(function, handle, FUNCTION);
    int beside = 0;
    if (!told || !told->count || !told->attributes) return refuse(INVALID_VALUE, "%s: no attributes", __func__);
    if (setting("STUB_CUDA_CAPABILITY", 90) < 90) return refuse(INVALID_VALUE, "%s: this device has none of them", __func__);
    for (unsigned i = 0; i < told->count; i++) {
        const unsigned *value = told->attributes[i].value;
        if (told->attributes[i].id == 6 && value[0] == 1) { /* programmatic stream serialisation */
            struct thing *in = find(told->stream, STREAM);
            if (!in || !in->size || in->ops[in->size - 1].what != KERNEL)
                return refuse(INVALID_VALUE, "%s: there is no kernel in front of %s", __func__, function->name);
            if (!waits_itself(function->module->image))
                return refuse(INVALID_VALUE, "%s: %s waits for nobody", __func__, function->name);
            beside = 1;
        } else if (told->attributes[i].id != 4 || value[0] < 1 || value[0] > 8 || value[1] != 1 || value[2] != 1 ||
                   told->grid[0] % value[0]) /* clusters */
            return refuse(INVALID_VALUE, "%s: not the attributes that are known here", __func__);
    }
    return start(__func__, handle, told->grid, told->block[0] * told->block[1] * told->block[2], told->shared, told->stream,
                 params, extra, beside);
}
/* Exported by its name, as it is found by ctypes. The rules are those of the driver's documentation for two dimensions. */
int cuTensorMapEncodeTiled(void *out, int kind, unsigned rank, void *at, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    ENTER(ANYWHERE);
    static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2}; /* u8, u16, u32, i32, u64, i64, fp16, fp32, fp64, bf16 */
    if ((uintptr_t)out % MAP_ALIGNED) return refuse(INVALID_VALUE, "%s: a map at %p", __func__, out);
    if (kind < 0 || kind > 9 || rank != 2 || interleave || swizzle < 0 || swizzle > 3 || promotion < 0 || promotion > 3 || fill)
        return refuse(INVALID_VALUE, "%s: what is not known here", __func__);
    if ((uintptr_t)at % 16 || strides[0] % 16 || strides[0] < sizes[0] * bytes[kind] || strides[0] >> 40)
        return refuse(INVALID_VALUE, "%s: an address %p, rows of %llu bytes", __func__, at, (unsigned long long)strides[0]);
    for (int i = 0; i < 2; i++)
        if (!sizes[i] || sizes[i] >> 32 || !box[i] || box[i] > 256 || steps[i] != 1)
            return refuse(INVALID_VALUE, "%s: a side of %llu, of a box %u", __func__, (unsigned long long)sizes[i], box[i]);
    unsigned row = box[0] * bytes[kind];
    if (row % 16 || (swizzle && row > 16u << swizzle)) return refuse(INVALID_VALUE, "%s: %u bytes of a box's row", __func__, row);
    struct map *map = memset(out, 0, MAP);
    memcpy(map->magic, "tensor", 7);
    map->at = (uintptr_t)at, map->bytes = (sizes[1] - 1) * strides[0] + sizes[0] * bytes[kind];
    if (!within(map->at, map->bytes, MEMORY)) return refuse(INVALID_VALUE, "%s: not within an allocation", __func__);
    return 0;
}

/* -- graphs -------------------------------------------------------------------------------------------------------- */
static int cuStreamBeginCapture(void *handle, int mode) {
    ENTER(IN_CONTEXT);
    FIND(stream, handle, STREAM);
    if (stream->capturing || mode < 0 || mode > 2) return refuse(INVALID_VALUE, "%s within another", __func__);
    finish(stream, stream->size); /* what was there goes its way; from here on its list is that of the graph */
    stream->capturing = 1, stream->mode = mode, stream->invalid = 0;
    return dead;
}
static int cuStreamEndCapture(void *handle, void **out) {
    ENTER(IN_CONTEXT);
    FIND(stream, handle, STREAM);
    *out = NULL;
    if (!stream->capturing) return refuse(INVALID_VALUE, "%s without a beginning", __func__);
    int invalid = stream->invalid;
    stream->capturing = stream->invalid = 0;
    if (invalid) return stream->size = 0, INVALIDATED;
    struct thing *graph = make(GRAPH);
    graph->ops = stream->ops, graph->size = stream->size, *out = graph;
    stream->ops = NULL, stream->size = 0;
    return 0;
}
static int cuGraphInstantiate(void **out, void *handle, unsigned long long flags) {
    ENTER(IN_CONTEXT);
    FIND(graph, handle, GRAPH);
    struct thing *ready = make(READY);
    ready->ops = memcpy(malloc((graph->size + 1) * sizeof *graph->ops), graph->ops, graph->size * sizeof *graph->ops);
    ready->size = graph->size, *out = ready;
    return flags & ~15ull ? refuse(INVALID_VALUE, "flags %llu", flags) : 0;
}
static int cuGraphDestroy(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(graph, handle, GRAPH);
    drop(graph);
    return 0;
}
static int cuGraphLaunch(void *handle, void *on) {
    ENTER(IN_CONTEXT);
    FIND(ready, handle, READY);
    FIND(stream, on, STREAM);
    for (size_t i = 0; i < ready->size && !failed; i++) failed = add(__func__, stream, &ready->ops[i]);
    return failed;
}
static int cuGraphExecDestroy(void *handle) {
    ENTER(IN_CONTEXT);
    FIND(ready, handle, READY);
    drop(ready);
    return 0;
}

/* -- how it is found, and what tests ask --------------------------------------------------------------------------- */
#define CALL(name, since) {#name, since, (void *)name}
static const struct { const char *name; int since; void *call; } table[] = {
    CALL(cuInit, 2000), CALL(cuDriverGetVersion, 2020), CALL(cuDeviceGetCount, 2000), CALL(cuDeviceGet, 2000),
    CALL(cuDeviceGetName, 2000), CALL(cuDeviceGetAttribute, 2000), CALL(cuDevicePrimaryCtxRetain, 7000),
    CALL(cuDevicePrimaryCtxRelease, 11000), CALL(cuDevicePrimaryCtxReset, 11000), CALL(cuCtxSetCurrent, 4000),
    CALL(cuDeviceCanAccessPeer, 4000), CALL(cuIpcGetMemHandle, 4010), CALL(cuIpcOpenMemHandle, 11000),
    CALL(cuIpcCloseMemHandle, 4010), CALL(cuMemGetInfo, 3020), CALL(cuMemAlloc, 3020), CALL(cuMemFree, 3020), CALL(cuMemHostAlloc, 2020),
    CALL(cuMemFreeHost, 2000), CALL(cuMemcpyHtoDAsync, 3020), CALL(cuMemcpyDtoHAsync, 3020),
    CALL(cuMemcpyDtoDAsync, 3020), CALL(cuMemcpy2DAsync, 3020), CALL(cuMemsetD8Async, 3020), CALL(cuStreamCreate, 2000),
    CALL(cuStreamSynchronize, 2000), CALL(cuStreamDestroy, 4000), CALL(cuEventCreate, 2000), CALL(cuEventRecord, 2000),
    CALL(cuEventSynchronize, 2000), CALL(cuEventElapsedTime, 2000), CALL(cuEventDestroy, 4000),
    CALL(cuModuleLoadData, 2000), CALL(cuModuleGetFunction, 2000), CALL(cuModuleUnload, 2000),
    CALL(cuFuncSetAttribute, 9000), CALL(cuLaunchKernel, 4000), CALL(cuLaunchKernelEx, 11060), CALL(cuStreamBeginCapture, 10010),
    CALL(cuStreamEndCapture, 10000), {"cuGraphInstantiateWithFlags", 11040, (void *)cuGraphInstantiate}, CALL(cuGraphDestroy, 10000),
    CALL(cuGraphLaunch, 10000), CALL(cuGraphExecDestroy, 10000),
};

/* status: 1 where there is no such call, 2 where this driver is too old for the version that is asked for */
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    *out = NULL;
    (void)flags;
    if (status) *status = 1;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) || table[i].since > version) continue;
        int old = table[i].since > setting("STUB_CUDA_VERSION", 13000);
        *out = old ? NULL : table[i].call;
        if (status) *status = old ? 2 : 0;
        return old ? NOT_FOUND : 0;
    }
    return NOT_FOUND;
}

const char *stub_refused(void) { return refused; }
const char *stub_launch(size_t i) { return i < launch_count ? launches[i] : ""; } /* name grid threads shared parameters */
size_t stub_launches(void) { return launch_count; }
long stub_besides(void) { return besides; } /* of these, those that may have begun beside the one in front */
void stub_fail(const char *name, long nth, int code) { /* from now on */
    planned("");
    strcpy(fails_of[fail_count], name);
    fails_at[fail_count] = nth, fails[fail_count++] = code;
}
long stub_calls(const char *name) {
    for (int i = 0; calls_of[i][0]; i++)
        if (!strcmp(calls_of[i], name)) return calls[i];
    return 0;
}
long stub_waits(void) { return waits; } /* for work that was not done yet */
static struct thing *named(const char *name) {
    for (struct thing *one = things; one; one = one->next)
        if (one->kind == FUNCTION && !strcmp(one->name, name)) return one;
    return NULL;
}
int stub_parameters(const char *name) { return named(name) ? (int)named(name)->count : -1; }
int stub_parameter(const char *name, int i) { return (int)named(name)->sizes[i]; }
long stub_held(int kind) { /* how many of a kind; 0: how often the context is retained */
    long found = kind ? 0 : retained;
    for (struct thing *one = things; one; one = one->next) found += (int)one->kind == kind;
    return found;
}
