// `sparsemla info`: what this build and this machine can do, and why not.
#include <fmt/core.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "sparsemla/backend.h"
#include "sparsemla/huge_pages.h"
#include "tools/commands.h"

namespace sparsemla::tools {
namespace {

using Json = nlohmann::ordered_json;

struct InfoOptions {
  int32_t num_heads = 16;
  bool json = false;
};

constexpr std::array kEnvironment = {"SPARSEMLA_BACKEND", "SPARSEMLA_CPU_KERNEL",
                                     "SPARSEMLA_NUM_THREADS"};

// The usual query and output type beside a cache format.
DType ModelDType(CacheFormat format) {
  if (format == CacheFormat::kFloat32) return DType::kFloat32;
  return format == CacheFormat::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

Json DescribeKernels(const Backend& backend) {
  Json kernels = Json::array();
  for (const KernelInfo& kernel : backend.kernels()) {
    kernels.push_back({{"name", kernel.name},
                       {"selected", kernel.selected},
                       {"unavailable_reason", kernel.unavailable_reason}});
  }
  return kernels;
}

// Of each cache format, why it is not supported, or which kernel runs it.
void DescribeFormats(const Backend& backend, int32_t num_heads, Json& entry) {
  Json reasons = Json::object();
  Json kernels = Json::object();
  for (int32_t f = 0; f < kNumCacheFormats; ++f) {
    const auto format = static_cast<CacheFormat>(f);
    const DType model = ModelDType(format);
    const Problem problem = {.dims = {.num_heads = num_heads},
                             .q_dtype = model,
                             .cache_format = format,
                             .out_dtype = model};
    const std::string name(CacheFormatName(format));
    const std::string reason = backend.UnsupportedReason(problem);
    reasons[name] = reason;
    if (reason.empty()) kernels[name] = backend.KernelName(problem);
  }
  entry["unsupported_reason"] = reasons;
  entry["kernel_of_format"] = kernels;
}

Json DescribeBackend(std::string_view name, int32_t num_heads) {
  Json entry = {{"name", name}};
  const auto backend = CreateBackend(name);
  if (!backend.ok()) {
    entry["unavailable_reason"] = backend.status().message();
    return entry;
  }
  const DeviceInfo device = backend.value()->device();
  entry["unavailable_reason"] = "";
  entry["device"] = device.name;
  entry["features"] = device.features;
  entry["num_compute_units"] = device.num_compute_units;
  entry["num_threads"] = device.num_threads;
  entry["kernels"] = DescribeKernels(*backend.value());
  DescribeFormats(*backend.value(), num_heads, entry);
  return entry;
}

// The system's setting, and whether memory that asks for huge pages gets them.
Json DescribeHugePages() {
  constexpr size_t kProbeBytes = 8 * kHugePageBytes;
  Json entry = {{"setting", HugePageSetting()}, {"probe_bytes", kProbeBytes}};
  const auto probe = HugePageBuffer::Allocate(kProbeBytes);
  if (!probe.ok()) {
    entry["unavailable_reason"] = probe.status().message();
    return entry;
  }
  std::memset(probe->data(), 1, probe->bytes());
  const auto granted = CountHugePageBytes(probe->data(), probe->bytes());
  entry["unavailable_reason"] = granted.status().message();
  if (granted.ok()) entry["granted_bytes"] = granted.value();
  return entry;
}

Json Describe(const InfoOptions& options) {
  Json environment = Json::object();
  for (const char* name : kEnvironment) {
    const char* value = std::getenv(name);
    environment[name] = value == nullptr ? Json() : Json(value);
  }
  Json backends = Json::array();
  for (const std::string_view name : BackendNames()) {
    backends.push_back(DescribeBackend(name, options.num_heads));
  }
  return {{"version", Version()},
          {"num_heads", options.num_heads},
          {"backends", backends},
          {"huge_pages", DescribeHugePages()},
          {"environment", environment}};
}

void PrintBackend(const Json& backend) {
  const auto text = [](const Json& value) { return value.get<std::string>(); };
  fmt::print("\nback end {}", text(backend["name"]));
  const std::string reason = text(backend["unavailable_reason"]);
  if (!reason.empty()) {
    fmt::print(": not available, {}\n", reason);
    return;
  }
  fmt::print("\n  device    {}; {} compute units, {} threads\n", text(backend["device"]),
             backend["num_compute_units"].get<int32_t>(), backend["num_threads"].get<int32_t>());
  if (!text(backend["features"]).empty()) {
    fmt::print("  features  {}\n", text(backend["features"]));
  }
  for (const Json& kernel : backend["kernels"]) {
    const std::string why_not = text(kernel["unavailable_reason"]);
    fmt::print("  kernel    {:24} {}\n", text(kernel["name"]),
               !why_not.empty()                 ? "no: " + why_not
               : kernel["selected"].get<bool>() ? "selected"
                                                : "available");
  }
}

// Back ends that exist here are the columns; the kernel that runs a format stands there.
void PrintSupport(const Json& info) {
  fmt::print("\nsupport ({} heads, 512 + 64 columns)\n  {:14}", info["num_heads"].get<int32_t>(),
             "cache format");
  for (const Json& backend : info["backends"]) {
    if (backend.contains("unsupported_reason")) {
      fmt::print("{:22}", backend["name"].get<std::string>());
    }
  }
  fmt::print("\n");
  for (int32_t f = 0; f < kNumCacheFormats; ++f) {
    const std::string format(CacheFormatName(static_cast<CacheFormat>(f)));
    fmt::print("  {:14}", format);
    std::string reasons;
    for (const Json& backend : info["backends"]) {
      if (!backend.contains("unsupported_reason")) continue;
      const std::string why_not = backend["unsupported_reason"][format].get<std::string>();
      if (why_not.empty()) {
        fmt::print("{:22}", backend["kernel_of_format"][format].get<std::string>());
        continue;
      }
      fmt::print("{:22}", "no");
      reasons += fmt::format("  {}: {}", backend["name"].get<std::string>(), why_not);
    }
    fmt::print("{}\n", reasons);
  }
}

void PrintHugePages(const Json& pages) {
  fmt::print("\nhuge pages\n  setting                {}\n", pages["setting"].get<std::string>());
  if (pages.contains("granted_bytes")) {
    fmt::print("  probe                  {} of {} MB granted\n",
               pages["granted_bytes"].get<size_t>() >> 20,
               pages["probe_bytes"].get<size_t>() >> 20);
  } else {
    fmt::print("  probe                  {}\n", pages["unavailable_reason"].get<std::string>());
  }
}

int Info(const InfoOptions& options) {
  const Json info = Describe(options);
  if (options.json) {
    // Environment variables may hold any bytes.
    fmt::print("{}\n", info.dump(2, ' ', false, Json::error_handler_t::replace));
    return kExitOk;
  }
  fmt::print("sparsemla {}\n", Version());
  for (const Json& backend : info["backends"]) PrintBackend(backend);
  PrintSupport(info);
  PrintHugePages(info["huge_pages"]);
  fmt::print("\nenvironment\n");
  for (const auto& [name, value] : info["environment"].items()) {
    fmt::print("  {:22} {}\n", name, value.is_null() ? "not set" : value.get<std::string>());
  }
  return kExitOk;
}

}  // namespace

void RegisterInfo(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "Back ends, kernels and formats of this machine, with why-nots");
  command->add_option("--num-heads", options->num_heads, "Head count of the support table")
      ->check(CLI::Range(1, kMaxNumHeads))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &exit_code] { exit_code = Info(*options); });
}

}  // namespace sparsemla::tools
