/* Stand-ins for the functions of cuBLAS, cuDNN and cuSPARSELt that must do more than return 0.
 * `build.py` generates all other functions, which only return 0. Each stand-in library has the
 * functions of all three libraries. NCCL's are in nccl.c. */
#include <stdlib.h>
#include <string.h>

#define HANDLE ((void *)0x40) /* a handle, which callers only pass on */

int cublasCreate_v2(void **handle) {
    *handle = HANDLE;
    return 0;
}

int cublasLtCreate(void **handle) {
    *handle = HANDLE;
    return 0;
}

int cublasGetVersion_v2(void *handle, int *version) {
    *version = 130000;
    return 0;
}

size_t cublasLtGetVersion(void) {
    return 130000;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

#define HEURISTIC_BYTES 96 /* size of cublasLtMatmulHeuristicResult_t */

/* Return one algorithm for the matrix product; it needs no working memory. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                   void *preference, int most, void *ways, int *count) {
    memset(ways, 0, HEURISTIC_BYTES);
    *count = 1;
    return 0;
}

int cudnnCreate(void **handle) {
    *handle = HANDLE;
    return 0;
}

size_t cudnnGetVersion(void) {
    return 92000;
}

size_t cudnnGetCudartVersion(void) {
    return 13000;
}

/* `part` is 0 for the major version, 1 for the minor version, and 2 for the patch level. */
int cudnnGetProperty(int part, int *value) {
    *value = part == 0 ? 9 : part == 1 ? 20 : 0;
    return 0;
}

const char *cudnnGetErrorString(int error) {
    return "an error of the null GPU";
}

int cudnnBackendCreateDescriptor(int kind, void **descriptor) {
    *descriptor = calloc(1, 64);
    return 0;
}

enum { CUDNN_DESCRIPTOR = 15, LONGEST_VALUE = 8 };

/* Return one value: 0. If the value is a descriptor, the caller has already created it, and it
 * stays unchanged. */
int cudnnBackendGetAttribute(void *descriptor, int name, int type, long most, long *count,
                             void *values) {
    if (count)
        *count = 1;
    if (values && most > 0 && type != CUDNN_DESCRIPTOR)
        memset(values, 0, type < CUDNN_DESCRIPTOR ? 1 : LONGEST_VALUE);
    return 0;
}

int cusparseLtGetVersion(void *handle, int *version) {
    *version = 800;
    return 0;
}
