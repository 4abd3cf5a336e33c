/* This header is for the files isa_*.c, which are compiled once for each instruction set, with its name in HVD_ISA and
 * with the compiler's -m options. HVD_NAME(x) is the name of x for this instruction set. Functions that are used in
 * only one file are static.
 *
 * Results have the same bits with every instruction set and every number of threads: sums are computed over fixed lanes
 * and fixed blocks, which are added in order, and the compiler does not fuse operations (-ffp-contract=off). Code with
 * explicit instructions is inside `#ifdef __AVX512F__` and `#ifdef __AVX2__`, next to plain code that gives the same
 * results. */
#ifndef HVD_ISA_H
#define HVD_ISA_H

#include "hvdcomp.h"
#include "parallel.h"

#define HVD_JOINED(name, isa) hvd_##name##_##isa
#define HVD_JOIN(name, isa) HVD_JOINED(name, isa)
#define HVD_NAME(name) HVD_JOIN(name, HVD_ISA)

#define HVD_KERNEL(type, name, parameters, arguments) type HVD_NAME(name) parameters;
#include "kernels.def"
#undef HVD_KERNEL

#endif
