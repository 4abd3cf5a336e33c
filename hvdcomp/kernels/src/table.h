/* The kernels of one instruction set as a table of functions. */
#ifndef HVD_TABLE_H
#define HVD_TABLE_H

#include "hvdcomp.h"

struct hvd_kernels {
    const char *instruction_set;
#define HVD_KERNEL(type, name, parameters, arguments) type(*name) parameters;
#include "kernels.def"
#undef HVD_KERNEL
};

#endif
