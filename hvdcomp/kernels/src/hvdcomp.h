/* The functions of the shared object and their types, in plain C, so that all frameworks can use the same object.
 *
 * The kernels themselves are listed in kernels.def. Each is exported as hvd_<name>. Python reads the same list for its
 * ctypes signatures, so a kernel may take and return only the types in `hvdcomp/kernels/signatures.py`: pointers and
 * the numbers int32_t, int64_t, uint32_t, uint64_t, float and double. */
#ifndef HVDCOMP_H
#define HVDCOMP_H

#include <stdint.h>

#include "bucket.h"
#include "sparse.h"

#define HVD_EXPORT __attribute__((visibility("default")))

/* Version of the functions' parameters. Python refuses to load an object with a different version. */
#define HVD_ABI_VERSION 1

HVD_EXPORT int32_t hvd_abi_version(void);

/* A digest of the sources that the object was built from. Python refuses to load an object with a different digest. */
HVD_EXPORT const char *hvd_sources(void);

/* The instruction set whose kernels are called: "plain", "avx2" or "avx512". At first, it is the best one that this CPU
 * supports. */
HVD_EXPORT const char *hvd_instruction_set(void);

/* Switches all threads to the kernels of a different instruction set. Returns 0 on success, 1 if the object has no such
 * kernels, and 2 if this CPU lacks the instructions. */
HVD_EXPORT int32_t hvd_use_instruction_set(const char *name);

#define HVD_KERNEL(type, name, parameters, arguments) HVD_EXPORT type hvd_##name parameters;
#include "kernels.def"
#undef HVD_KERNEL

#endif
