// Marks functions that host compilers, nvcc and hipcc all compile.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SPARSEMLA_HD __host__ __device__
#else
#define SPARSEMLA_HD
#endif
