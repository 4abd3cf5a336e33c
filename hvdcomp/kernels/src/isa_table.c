/* Fills the table of one instruction set. */
#include "isa.h"
#include "table.h"

#define HVD_QUOTED(text) #text
#define HVD_QUOTE(text) HVD_QUOTED(text)

extern const struct hvd_kernels HVD_NAME(kernels);

const struct hvd_kernels HVD_NAME(kernels) = {
    HVD_QUOTE(HVD_ISA),
#define HVD_KERNEL(type, name, parameters, arguments) HVD_NAME(name),
#include "kernels.def"
#undef HVD_KERNEL
};
