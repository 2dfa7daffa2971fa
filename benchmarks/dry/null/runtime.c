/* A stand-in for libcudart.so.13, the CUDA runtime. A launch succeeds if the grid is legal, but the
 * kernel computes nothing. All work is complete when its call returns, so streams and events have
 * no effect. */
#define _GNU_SOURCE
#include "null.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096
#define MOST_THREADS 1024
#define MOST_BLOCKS_YZ 65535

/* -- the device ------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_RELEASE;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_RELEASE;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = null_attribute(attribute);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *device, int number) {
    memset(device, 0, sizeof *device);
    strcpy(device->name, DEVICE_NAME);
    pid_t process = getpid(); /* each process has a device of its own */
    memset(device->uuid.bytes, 1, sizeof device->uuid.bytes);
    memcpy(device->uuid.bytes, &process, sizeof process);
    device->major = CAPABILITY_MAJOR;
    device->minor = CAPABILITY_MINOR;
    device->totalGlobalMem = TOTAL_BYTES;
    device->multiProcessorCount = null_attribute(cudaDevAttrMultiProcessorCount);
    device->warpSize = null_attribute(cudaDevAttrWarpSize);
    device->maxThreadsPerBlock = MOST_THREADS;
    device->maxThreadsPerMultiProcessor =
        null_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    for (int i = 0; i < 3; i++) {
        device->maxThreadsDim[i] = null_attribute(cudaDevAttrMaxBlockDimX + i);
        device->maxGridSize[i] = null_attribute(cudaDevAttrMaxGridDimX + i);
    }
    device->sharedMemPerBlock = null_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    device->sharedMemPerBlockOptin = null_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    device->sharedMemPerMultiprocessor =
        null_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    device->regsPerBlock = null_attribute(cudaDevAttrMaxRegistersPerBlock);
    device->regsPerMultiprocessor = null_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    device->l2CacheSize = null_attribute(cudaDevAttrL2CacheSize);
    device->memoryBusWidth = null_attribute(cudaDevAttrGlobalMemoryBusWidth);
    device->totalConstMem = 64 << 10;
    device->textureAlignment = 512;
    device->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) {
    static __thread char text[64];
    snprintf(text, sizeof text, "error %d of the null GPU", error);
    return text;
}

const char *cudaGetErrorString(cudaError_t error) {
    return cudaGetErrorName(error);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                             unsigned int version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = driver ? dlsym(driver, name) : 0;
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

/* -- memory ----------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **address, size_t bytes) {
    *address = null_reserve(bytes);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *address) {
    null_free(address);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = null_free_bytes();
    *total = TOTAL_BYTES;
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned int flags) {
    size_t pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES;
    *address = aligned_alloc(PAGE_BYTES, pages * PAGE_BYTES);
    null_remember(*address, bytes, NULL_HOST);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    if (null_forget(address))
        free(address);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned int flags) {
    if (null_place_of(address) != NULL_NOWHERE)
        return cudaErrorHostMemoryAlreadyRegistered;
    null_remember(address, bytes, NULL_HOST);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    return null_forget(address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    switch (null_place_of(address)) {
    case NULL_NOWHERE:
        found->type = cudaMemoryTypeUnregistered;
        found->device = -1;
        break;
    case NULL_HOST:
        found->type = cudaMemoryTypeHost;
        found->devicePointer = found->hostPointer = (void *)address;
        break;
    case NULL_DEVICE:
        found->type = cudaMemoryTypeDevice;
        found->devicePointer = (void *)address;
        break;
    }
    return cudaSuccess;
}

/* Return the address of a global variable in device code: new memory, which is larger than any such
 * variable. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = calloc(1, 64 << 10);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    null_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    null_add(NULL_SYNC);
    null_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream) {
    null_copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
    null_add(NULL_COPY);
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    null_fill(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    null_fill(to, value, bytes);
    return cudaSuccess;
}

/* -- streams and events ----------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    *stream = calloc(1, 1); /* an address that no other stream has */
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    null_add(NULL_SYNC);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    null_add(NULL_SYNC);
    return cudaSuccess;
}

struct mark {
    unsigned int flags;
    int recorded;
    struct timespec at;
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    struct mark *mark = calloc(1, sizeof *mark);
    mark->flags = flags;
    *event = (cudaEvent_t)mark;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    struct mark *mark = (struct mark *)event;
    clock_gettime(CLOCK_MONOTONIC, &mark->at);
    mark->recorded = 1;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    null_add(NULL_SYNC);
    return cudaSuccess;
}

/* Return 1 if an event has a time. A real device refuses to measure the time between events that
 * were not recorded, or were created with cudaEventDisableTiming. */
static int is_timed(const struct mark *mark) {
    return mark->recorded && !(mark->flags & cudaEventDisableTiming);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    const struct mark *begin = (struct mark *)from, *end = (struct mark *)to;
    if (!is_timed(begin) || !is_timed(end))
        return cudaErrorInvalidResourceHandle;
    *ms = (end->at.tv_sec - begin->at.tv_sec) * 1e3f + (end->at.tv_nsec - begin->at.tv_nsec) / 1e6f;
    return cudaSuccess;
}

/* -- kernels ---------------------------------------------------------------------------------- */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t shared_bytes, cudaStream_t stream) {
    null_add(NULL_LAUNCH);
    size_t threads = (size_t)block.x * block.y * block.z;
    int is_legal = grid.x && grid.y && grid.z && grid.y <= MOST_BLOCKS_YZ &&
                   grid.z <= MOST_BLOCKS_YZ && threads && threads <= MOST_THREADS;
    return is_legal ? cudaSuccess : cudaErrorInvalidConfiguration;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel,
                                void **arguments) {
    return cudaLaunchKernel(kernel, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes,
                            how->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block,
                                        void **arguments, size_t shared_bytes,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

/* `kernel<<<grid, block>>>(...)` pushes the sizes, and the kernel's stub pops them. */
static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} pushed;

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                         cudaStream_t stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared_bytes = shared_bytes;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                       void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_bytes = pushed.shared_bytes;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* When a library is loaded, it registers the kernels that it contains. */
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

char __cudaInitModule(void **handle) {
    return 1;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                                   int threads,
                                                                   size_t shared_bytes,
                                                                   unsigned int flags) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel,
                                                          int threads, size_t shared_bytes) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->binaryVersion = found->ptxVersion = 10 * CAPABILITY_MAJOR + CAPABILITY_MINOR;
    found->maxThreadsPerBlock = MOST_THREADS;
    found->numRegs = 64;
    return cudaSuccess;
}
