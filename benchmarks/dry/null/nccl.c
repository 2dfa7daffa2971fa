/* libnccl.so.2: stand-ins for the functions of NCCL that make communicators and send messages. They
 * send nothing. They count calls and bytes, and refuse the wrong arguments that NCCL refuses
 * (src/misc/argcheck.cc and src/group.cc in github.com/NVIDIA/nccl). `build.py` generates all other
 * functions of NCCL, which only return 0. */
#include "null.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define MOST_COMMUNICATORS 4096

enum result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { SUM_SCALED = 5, OPERATIONS }; /* NCCL's last operation here, and the number of operations */

/* Kinds of calls. A rank's sends to itself, and their receives, are a kind of their own: NCCL copies
 * these bytes within the device. */
enum kind {
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE,
    SEND,
    RECEIVE,
    TO_ITSELF,
    EMPTY, /* a collective on 0 elements, which NCCL accepts and discards */
    KINDS,
};

struct unique_id {
    char bytes[128];
};

struct communicator {
    int ranks, rank;
    int is_alive;
    atomic_ulong calls[KINDS], bytes[KINDS];
};

static struct communicator communicators[MOST_COMMUNICATORS];
static int made;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* NCCL has one group for each thread. `has_work` is 1 if the open group contains a call that
 * launches a kernel, and `group_error` is the first error of a call in the open group. */
static __thread int depth, has_work;
static __thread enum result group_error;
static atomic_int open_groups; /* the outermost groups of all threads */

/* -- counts, which benchmarks/dry/messages.py reads ------------------------------------------- */

int null_nccl_communicators(void) {
    return made;
}

int null_nccl_ranks(int number) {
    return communicators[number].ranks;
}

unsigned long null_nccl_calls(int number, int kind) {
    return atomic_load(&communicators[number].calls[kind]);
}

/* Return the sum of the calls' number of elements times the bytes of an element. */
unsigned long null_nccl_bytes(int number, int kind) {
    return atomic_load(&communicators[number].bytes[kind]);
}

/* Return the number of threads whose groups have begun and not ended. */
int null_nccl_open_groups(void) {
    return atomic_load(&open_groups);
}

/* -- communicators ---------------------------------------------------------------------------- */

/* Return 1 if `communicator` was made and not destroyed. */
static int is_alive(const struct communicator *communicator) {
    uintptr_t begin = (uintptr_t)communicators, place = (uintptr_t)communicator;
    return place >= begin && place < begin + sizeof communicators && communicator->is_alive;
}

static enum result make(struct communicator **communicator, int ranks, int rank) {
    if (!communicator || ranks < 1 || rank < 0 || rank >= ranks)
        return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    int fits = made < MOST_COMMUNICATORS;
    if (fits) {
        *communicator = &communicators[made];
        (*communicator)->ranks = ranks;
        (*communicator)->rank = rank;
        (*communicator)->is_alive = 1;
        made++;
    }
    pthread_mutex_unlock(&lock);
    return fits ? SUCCESS : SYSTEM_ERROR;
}

enum result ncclCommInitRank(struct communicator **communicator, int ranks, struct unique_id id,
                             int rank) {
    return make(communicator, ranks, rank);
}

enum result ncclCommInitRankConfig(struct communicator **communicator, int ranks,
                                   struct unique_id id, int rank, void *config) {
    return make(communicator, ranks, rank);
}

enum result ncclCommInitRankScalable(struct communicator **communicator, int ranks, int rank,
                                     int ids, struct unique_id *id, void *config) {
    return make(communicator, ranks, rank);
}

static enum result destroy(struct communicator *communicator) {
    if (!communicator)
        return SUCCESS;
    if (!is_alive(communicator))
        return INVALID_ARGUMENT;
    communicator->is_alive = 0;
    return SUCCESS;
}

enum result ncclCommDestroy(struct communicator *communicator) {
    return destroy(communicator);
}

enum result ncclCommAbort(struct communicator *communicator) {
    return destroy(communicator);
}

enum result ncclCommCount(struct communicator *communicator, int *ranks) {
    if (!is_alive(communicator))
        return INVALID_ARGUMENT;
    *ranks = communicator->ranks;
    return SUCCESS;
}

enum result ncclCommUserRank(struct communicator *communicator, int *rank) {
    if (!is_alive(communicator))
        return INVALID_ARGUMENT;
    *rank = communicator->rank;
    return SUCCESS;
}

enum result ncclCommCuDevice(struct communicator *communicator, int *device) {
    *device = 0; /* each process has one device */
    return is_alive(communicator) ? SUCCESS : INVALID_ARGUMENT;
}

enum result ncclCommGetAsyncError(struct communicator *communicator, enum result *error) {
    *error = SUCCESS;
    return is_alive(communicator) ? SUCCESS : INVALID_ARGUMENT;
}

/* -- groups ----------------------------------------------------------------------------------- */

enum result ncclGroupStart(void) {
    if (!depth)
        atomic_fetch_add(&open_groups, 1);
    depth++;
    return SUCCESS;
}

/* The end of the outermost group launches one kernel for all calls of the group. If a call was
 * refused, the whole group is refused. */
enum result ncclGroupEnd(void) {
    if (!depth)
        return INVALID_USAGE;
    depth--;
    if (depth)
        return SUCCESS;
    atomic_fetch_sub(&open_groups, 1);
    enum result error = group_error;
    if (!error && has_work)
        null_add(NULL_LAUNCH);
    has_work = 0;
    group_error = SUCCESS;
    return error;
}

/* -- messages --------------------------------------------------------------------------------- */

/* The bytes of an element, by the number of its type: int8, uint8, int32, uint32, int64, uint64,
 * float16, float32, float64, bfloat16, and the two types of float8. */
static const size_t type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { TYPES = sizeof type_bytes / sizeof *type_bytes };

struct message {
    const void *read, *written; /* 0: this rank's call has no such tensor */
    size_t count;
    int type, operation, peer;
};

static enum result check(const struct communicator *communicator, struct message message) {
    if (!is_alive(communicator))
        return INVALID_ARGUMENT;
    if (message.peer < 0 || message.peer >= communicator->ranks)
        return INVALID_ARGUMENT;
    if (message.type < 0 || message.type >= TYPES)
        return INVALID_ARGUMENT;
    if (message.operation < 0 || message.operation >= OPERATIONS)
        return INVALID_ARGUMENT;
    return SUCCESS;
}

/* Return 1 if a kernel may access `tensor`, if there is one. NCCL refuses other memory if
 * NCCL_CHECK_POINTERS is set; otherwise its kernel fails. */
static int is_reachable(const void *tensor) {
    return !tensor || null_place_of(tensor) != NULL_NOWHERE;
}

static enum result call(struct communicator *communicator, enum kind kind,
                        struct message message) {
    enum result error = check(communicator, message);
    if (!error && message.count && !(is_reachable(message.read) && is_reachable(message.written)))
        error = INVALID_ARGUMENT;
    if (error) {
        if (depth && !group_error)
            group_error = error;
        return error;
    }
    int is_of_pair = kind == SEND || kind == RECEIVE;
    if (is_of_pair && message.peer == communicator->rank)
        kind = TO_ITSELF;
    if (!is_of_pair && !message.count)
        kind = EMPTY;
    atomic_fetch_add(&communicator->calls[kind], 1);
    atomic_fetch_add(&communicator->bytes[kind], message.count * type_bytes[message.type]);
    if (depth)
        has_work |= kind != EMPTY;
    else if (kind != EMPTY)
        null_add(NULL_LAUNCH);
    return SUCCESS;
}

enum result ncclAllReduce(const void *read, void *written, size_t count, int type, int operation,
                          struct communicator *communicator, void *stream) {
    return call(communicator, ALL_REDUCE,
                (struct message){read, written, count, type, operation});
}

enum result ncclAllGather(const void *read, void *written, size_t count, int type,
                          struct communicator *communicator, void *stream) {
    return call(communicator, ALL_GATHER, (struct message){read, written, count, type});
}

enum result ncclReduceScatter(const void *read, void *written, size_t count, int type,
                              int operation, struct communicator *communicator, void *stream) {
    return call(communicator, REDUCE_SCATTER,
                (struct message){read, written, count, type, operation});
}

enum result ncclAlltoAll(const void *read, void *written, size_t count, int type,
                         struct communicator *communicator, void *stream) {
    return call(communicator, ALL_TO_ALL, (struct message){read, written, count, type});
}

enum result ncclBroadcast(const void *read, void *written, size_t count, int type, int root,
                          struct communicator *communicator, void *stream) {
    int is_root = is_alive(communicator) && communicator->rank == root;
    return call(communicator, BROADCAST,
                (struct message){is_root ? read : 0, written, count, type, 0, root});
}

enum result ncclBcast(void *tensor, size_t count, int type, int root,
                      struct communicator *communicator, void *stream) {
    return ncclBroadcast(tensor, tensor, count, type, root, communicator, stream);
}

enum result ncclReduce(const void *read, void *written, size_t count, int type, int operation,
                       int root, struct communicator *communicator, void *stream) {
    int is_root = is_alive(communicator) && communicator->rank == root;
    return call(communicator, REDUCE,
                (struct message){read, is_root ? written : 0, count, type, operation, root});
}

enum result ncclSend(const void *read, size_t count, int type, int peer,
                     struct communicator *communicator, void *stream) {
    return call(communicator, SEND, (struct message){read, 0, count, type, 0, peer});
}

enum result ncclRecv(void *written, size_t count, int type, int peer,
                     struct communicator *communicator, void *stream) {
    return call(communicator, RECEIVE, (struct message){0, written, count, type, 0, peer});
}

/* PyTorch creates this operation, a sum of scaled tensors, for the mean of gradients. */
enum result ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int place,
                                     struct communicator *communicator) {
    *operation = SUM_SCALED;
    return is_alive(communicator) ? SUCCESS : INVALID_ARGUMENT;
}

/* -- the library ------------------------------------------------------------------------------ */

enum result ncclGetVersion(int *version) {
    *version = 22907;
    return SUCCESS;
}

enum result ncclGetUniqueId(struct unique_id *id) {
    return SUCCESS;
}

const char *ncclGetErrorString(enum result error) {
    switch (error) {
    case INVALID_ARGUMENT:
        return "invalid argument";
    case INVALID_USAGE:
        return "invalid usage";
    default:
        return "an error of the null GPU";
    }
}

const char *ncclGetLastError(struct communicator *communicator) {
    return "";
}
