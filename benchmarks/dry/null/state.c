/* libnullgpu.so: the state of the null GPU. Device memory is reserved host memory, whose pages the
 * system provides only when they are first accessed. Kernels access no memory, so even 80 GB of
 * device memory take hardly any memory of the host. */
#define _GNU_SOURCE
#include "null.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#define MOST_REGIONS 65536

/* Copies within the device, and fills with zero, are skipped if they have at least this number of
 * bytes. They would change nothing, because no kernel has written values to this memory. Skipping
 * them saves memory of the host, because pages that are not accessed take no memory. */
#define LEAST_UNTOUCHED ((size_t)1 << 20)

struct region {
    char *begin; /* 0: the entry is free */
    size_t bytes;
    enum null_place place;
};

static atomic_ulong counts[NULL_EVENTS];
static struct region regions[MOST_REGIONS];
static int used_regions;
static size_t used_bytes = CONTEXT_BYTES;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void null_add(enum null_event event) {
    atomic_fetch_add(&counts[event], 1);
}

unsigned long null_count(enum null_event event) {
    return atomic_load(&counts[event]);
}

/* Return the entry of the region that contains an address; 0 if there is none. The caller holds the
 * lock. */
static struct region *region_of(const void *address) {
    const char *place = address;
    for (int i = 0; i < used_regions; i++) {
        struct region *region = &regions[i];
        if (region->begin && place >= region->begin && place < region->begin + region->bytes)
            return region;
    }
    return 0;
}

void null_remember(void *address, size_t bytes, enum null_place place) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < used_regions && regions[i].begin)
        i++;
    if (i < MOST_REGIONS) {
        regions[i] = (struct region){address, bytes, place};
        if (i == used_regions)
            used_regions++;
    }
    pthread_mutex_unlock(&lock);
}

int null_forget(void *address) {
    pthread_mutex_lock(&lock);
    struct region *region = region_of(address);
    if (region)
        region->begin = 0;
    pthread_mutex_unlock(&lock);
    return region != 0;
}

enum null_place null_place_of(const void *address) {
    pthread_mutex_lock(&lock);
    struct region *region = region_of(address);
    enum null_place place = region ? region->place : NULL_NOWHERE;
    pthread_mutex_unlock(&lock);
    return place;
}

void *null_reserve(size_t bytes) {
    pthread_mutex_lock(&lock);
    int fits = bytes <= TOTAL_BYTES - used_bytes;
    if (fits)
        used_bytes += bytes;
    pthread_mutex_unlock(&lock);
    if (!fits)
        return 0;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *address = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    null_remember(address, bytes, NULL_DEVICE);
    null_add(NULL_ALLOCATE);
    return address;
}

void null_free(void *address) {
    pthread_mutex_lock(&lock);
    struct region *region = region_of(address);
    if (region) {
        munmap(region->begin, region->bytes);
        used_bytes -= region->bytes;
        region->begin = 0;
    }
    pthread_mutex_unlock(&lock);
}

size_t null_free_bytes(void) {
    pthread_mutex_lock(&lock);
    size_t bytes = TOTAL_BYTES - used_bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

void null_copy(void *to, const void *from, size_t bytes) {
    null_add(NULL_COPY);
    int within = null_place_of(to) == NULL_DEVICE && null_place_of(from) == NULL_DEVICE;
    if (!within || bytes < LEAST_UNTOUCHED)
        memmove(to, from, bytes);
}

void null_fill(void *to, int value, size_t bytes) {
    null_add(NULL_COPY);
    if (value || bytes < LEAST_UNTOUCHED)
        memset(to, value, bytes);
}

/* Numbers of cudaDeviceAttr and CUdevice_attribute, which are equal. */
int null_attribute(int attribute) {
    switch (attribute) {
    case 1: /* threads per block */
    case 2: /* block dimensions x and y (attribute 4 is z) */
    case 3:
        return 1024;
    case 4:
        return 64;
    case 5: /* grid dimensions x, y and z */
        return 2147483647;
    case 6:
    case 7:
        return 65535;
    case 8: /* shared memory per block */
        return 48 << 10;
    case 10: /* threads per warp */
        return 32;
    case 12: /* registers per block, and per multiprocessor */
    case 82:
        return 65536;
    case 13: /* clock, and clock of the memory, in kHz */
        return 1980000;
    case 36:
        return 2619000;
    case 16: /* multiprocessors */
        return 132;
    case 37: /* bits of the memory bus */
        return 5120;
    case 38: /* bytes of the second-level cache */
        return 50 << 20;
    case 39: /* threads per multiprocessor */
        return 2048;
    case 75:
        return CAPABILITY_MAJOR;
    case 76:
        return CAPABILITY_MINOR;
    case 81: /* shared memory per multiprocessor */
        return 228 << 10;
    case 97: /* shared memory per block that a kernel may request */
        return 227 << 10;
    case 106: /* blocks per multiprocessor */
        return 32;
    default: /* most other attributes say whether the device supports a feature */
        return 1;
    }
}
