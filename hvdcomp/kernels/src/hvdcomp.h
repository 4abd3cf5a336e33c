/* The functions of the shared object and their types. Plain C: one object serves every framework.
 *
 * The kernels themselves are listed in kernels.def. Each is exported as hvd_<name>. Python reads the same list for its
 * ctypes signatures, so a kernel takes and returns only what `hvdcomp/kernels/signatures.py` knows: pointers and the
 * numbers int32_t, int64_t, uint32_t, uint64_t, float and double. */
#ifndef HVDCOMP_H
#define HVDCOMP_H

#include <stdint.h>

#include "bucket.h"
#include "sparse.h"

#define HVD_EXPORT __attribute__((visibility("default")))

/* Version of the functions' parameters. Python refuses another version than its own. */
#define HVD_ABI_VERSION 1

HVD_EXPORT int32_t hvd_abi_version(void);

/* A digest of the sources that the object was built from. Python refuses an object with another digest. */
HVD_EXPORT const char *hvd_sources(void);

/* The instruction set whose kernels are called: "plain", "avx2" or "avx512". At first it is the best of this CPU. */
HVD_EXPORT const char *hvd_instruction_set(void);

/* Calls the kernels of another instruction set from now on, in all threads. Returns 0; 1 if the object has no such
 * kernels; 2 if this CPU lacks the instructions. */
HVD_EXPORT int32_t hvd_use_instruction_set(const char *name);

#define HVD_KERNEL(type, name, parameters, arguments) HVD_EXPORT type hvd_##name parameters;
#include "kernels.def"
#undef HVD_KERNEL

#endif
