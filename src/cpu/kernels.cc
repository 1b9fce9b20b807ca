#include "cpu/kernels.h"

#include "core/require.h"

namespace sparsemla::cpu {
namespace {

constexpr int64_t kLineFloats = Arena::kAlignment / sizeof(float);

constexpr int64_t PadToLine(int64_t floats) {
  return (floats + kLineFloats - 1) / kLineFloats * kLineFloats;
}

constexpr AttentionKernel kKernels[] = {
#define SPARSEMLA_ATTENTION_KERNEL(name, arch) {#name, arch, name},
#include "cpu/kernels.inc"
#undef SPARSEMLA_ATTENTION_KERNEL
};

std::string KernelNames() {
  std::string names;
  for (const AttentionKernel& kernel : kKernels) {
    if (!names.empty()) names += ", ";
    names += kernel.name;
  }
  return names;
}

}  // namespace

ArchFlags DetectArch() {
  ArchFlags arch = kAnyCpu;
#if defined(__x86_64__)
  // The compiler's runtime asks cpuid, and xgetbv for what the operating system saves.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    arch |= kAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      arch |= kAvx512;
    }
  }
#endif
  return arch;
}

std::string ArchNames(ArchFlags arch) {
  std::string names;
  if (arch & kAvx2) names += "avx2";
  if (arch & kAvx512) names += names.empty() ? "avx512f" : " avx512f";
  return names.empty() ? "baseline" : names;
}

AttentionScratch AttentionScratch::Carve(Arena& arena, const MlaDims& dims) {
  AttentionScratch scratch;
  const int64_t num_panels = (dims.head_dim_qk() + kPanelColumns - 1) / kPanelColumns;
  scratch.head_stride = PadToLine(dims.num_heads);
  scratch.value_stride = PadToLine(dims.kv_lora_rank);
  scratch.rows = arena.Take<const std::byte*>(2 * kKeyBlock);
  scratch.keys = arena.Take<float>(num_panels * kPanelFloats);
  scratch.queries = arena.Take<float>(dims.head_dim_qk() * scratch.head_stride);
  scratch.scores = arena.Take<float>(kKeyBlock * scratch.head_stride);
  scratch.out = arena.Take<float>(dims.num_heads * scratch.value_stride);
  scratch.max_log2 = arena.Take<float>(scratch.head_stride);
  scratch.sum = arena.Take<float>(scratch.head_stride);
  scratch.rescale = arena.Take<float>(scratch.head_stride);
  return scratch;
}

std::span<const AttentionKernel> AttentionKernels() {
  return kKernels;
}

std::string UnavailableReason(const AttentionKernel& kernel, ArchFlags arch) {
  const ArchFlags missing = kernel.arch & ~arch;
  if (missing == 0) return {};
  return StrCat("needs ", ArchNames(missing), "; this CPU has ", ArchNames(arch));
}

Result<const AttentionKernel*> SelectKernel(std::string_view name, ArchFlags arch) {
  for (const AttentionKernel& kernel : kKernels) {
    if (!name.empty() && name != kernel.name) continue;
    const std::string reason = UnavailableReason(kernel, arch);
    if (reason.empty()) return &kernel;
    if (!name.empty()) return Status(StatusCode::kUnsupported, StrCat(name, " ", reason));
  }
  return Status(StatusCode::kInvalidArgument,
                StrCat("no attention kernel is called '", name, "'; there are ", KernelNames()));
}

}  // namespace sparsemla::cpu
