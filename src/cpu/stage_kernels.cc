#include "cpu/stage_kernels.h"

#include <bit>

namespace sparsemla::cpu {
namespace {

// Best first.
constexpr StageKernels kStageKernels[] = {
#if defined(__x86_64__)
    {kAvx512, count_avx512, convert_avx512, sum_avx512},
    {kAvx2, count_avx2, convert_avx2, sum_avx2},
#endif
    {kAnyCpu, count_portable, convert_portable, sum_portable},
};

}  // namespace

const StageKernels& SelectStageKernels(ArchFlags arch) {
  const ArchFlags usable = DetectArch() & (std::bit_ceil(arch + 1) - 1);
  const StageKernels* kernels = kStageKernels;
  while ((kernels->arch & ~usable) != 0) ++kernels;  // the last row needs nothing
  return *kernels;
}

}  // namespace sparsemla::cpu
