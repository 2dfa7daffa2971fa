/* A stand-in for libcuda.so.1, the CUDA driver. It has the functions that PyTorch, Triton and the
 * Python bindings call. */
#define _GNU_SOURCE
#include "null.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int result; /* CUresult; 0 is success */

/* Handles. Callers only pass them on, so they need not be valid addresses. */
#define CONTEXT ((void *)0x10)
#define MODULE ((void *)0x20)
#define FUNCTION ((void *)0x30)

enum { POINTER_TYPE = 2, TYPE_HOST = 1, TYPE_DEVICE = 2 };

result cuDriverGetVersion(int *version) {
    *version = CUDA_RELEASE;
    return 0;
}

result cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}

result cuDeviceGet(int *device, int number) {
    *device = 0;
    return 0;
}

result cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, DEVICE_NAME, length);
    return 0;
}

result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = null_attribute(attribute);
    return 0;
}

result cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return 0;
}

result cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = CONTEXT;
    return 0;
}

result cuCtxGetCurrent(void **context) {
    *context = CONTEXT;
    return 0;
}

result cuCtxGetDevice(int *device) {
    *device = 0;
    return 0;
}

result cuModuleLoad(void **module, const char *path) {
    *module = MODULE;
    return 0;
}

result cuModuleLoadData(void **module, const void *image) {
    *module = MODULE;
    return 0;
}

result cuModuleLoadDataEx(void **module, const void *image, unsigned int count, int *options,
                          void **values) {
    *module = MODULE;
    return 0;
}

result cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = FUNCTION;
    return 0;
}

/* Attribute 0 is the number of threads in a block, attribute 4 is the number of registers, and the
 * other attributes are sizes of memory. */
result cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}

result cuLaunchKernel(void *function, unsigned int grid_x) {
    null_add(NULL_LAUNCH);
    return 0;
}

result cuLaunchKernelEx(const void *how, void *function) {
    null_add(NULL_LAUNCH);
    return 0;
}

result cuLaunchCooperativeKernel(void *function, unsigned int grid_x) {
    null_add(NULL_LAUNCH);
    return 0;
}

result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                   size_t shared_bytes) {
    *blocks = 2;
    return 0;
}

result cuPointerGetAttribute(void *value, int attribute, unsigned long address) {
    enum null_place place = null_place_of((void *)address);
    if (place == NULL_NOWHERE)
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    if (attribute == POINTER_TYPE)
        *(unsigned int *)value = place == NULL_DEVICE ? TYPE_DEVICE : TYPE_HOST;
    else
        *(unsigned long *)value = address;
    return 0;
}

result cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = null_free_bytes();
    *total = TOTAL_BYTES;
    return 0;
}

result cuGetErrorString(int error, const char **text) {
    *text = "an error of the null GPU";
    return 0;
}

result cuGetErrorName(int error, const char **text) {
    return cuGetErrorString(error, text);
}

enum { NOT_FOUND = 500, LONGEST_NAME = 128 }; /* CUDA_ERROR_NOT_FOUND */

/* Find a function of this library; the Python bindings find all functions by this one. A function
 * that has a second version is found as that version. */
result cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags,
                           int *status) {
    char second[LONGEST_NAME];
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(second, sizeof second, "%s_v2", name);
    *function = dlsym(driver, second);
    if (!*function)
        *function = dlsym(driver, name);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? 0 : NOT_FOUND;
}
