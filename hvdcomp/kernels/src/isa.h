/* For files isa_*.c, which are compiled once for each instruction set, with HVD_ISA its name and the compiler's -m
 * options. HVD_NAME(x) is the name of x for this instruction set. Functions for this file alone are static.
 *
 * Every instruction set and every number of threads gives the same bits: sums are over fixed lanes and fixed blocks,
 * added in order, and the compiler contracts nothing (-ffp-contract=off). Explicit instructions go between
 * `#ifdef __AVX512F__` and `#ifdef __AVX2__`, beside plain code that gives the same. */
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
