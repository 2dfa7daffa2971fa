/* The state that all stand-in libraries share: the counts of events, and the reserved memory. */
#ifndef NULL_GPU_H
#define NULL_GPU_H

#include <stddef.h>

/* The device that the null GPU imitates: an H100 SXM with 80 GB. */
#define DEVICE_NAME "NVIDIA H100 80GB HBM3"
#define CAPABILITY_MAJOR 9
#define CAPABILITY_MINOR 0
#define CUDA_RELEASE 13000
#define TOTAL_BYTES ((size_t)81079 << 20)
#define CONTEXT_BYTES ((size_t)512 << 20) /* memory of a CUDA context on a real device */

enum null_event {
    NULL_LAUNCH,   /* a kernel, or a call of cuBLAS, cuDNN or NCCL that launches kernels */
    NULL_COPY,     /* a copy or a fill, which the device does without a kernel */
    NULL_SYNC,     /* a call that makes the host wait for the device */
    NULL_ALLOCATE, /* a reservation of device memory */
    NULL_CUDNN,    /* a call of cuDNN that launches kernels; it is also counted as a launch */
    NULL_EVENTS,
};

enum null_place { NULL_NOWHERE, NULL_HOST, NULL_DEVICE };

void null_add(enum null_event event);
unsigned long null_count(enum null_event event);

/* Reserve or free device memory. null_reserve returns 0 if the device has too little memory. */
void *null_reserve(size_t bytes);
void null_free(void *address);
size_t null_free_bytes(void);

/* Store, remove and look up whether memory at an address is on the host or on the device. */
void null_remember(void *address, size_t bytes, enum null_place place);
int null_forget(void *address); /* returns 0 if the memory was unknown */
enum null_place null_place_of(const void *address);

/* Copy or fill memory, as the device would. */
void null_copy(void *to, const void *from, size_t bytes);
void null_fill(void *to, int value, size_t bytes);

/* Return the value of an attribute of the device. An attribute has the same number in the runtime
 * and in the driver. */
int null_attribute(int attribute);

#endif
