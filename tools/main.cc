// The command-line tool: parses, dispatches, and turns whatever goes wrong into one line and an
// exit code.
#include <fmt/core.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "sparsemla/backend.h"
#include "tools/commands.h"

namespace sparsemla::tools {
namespace {

int Main(int argc, char** argv) {
  CLI::App app(
      "Sparse multi-head latent attention: run cases, look at plans, replay traffic, "
      "measure kernels",
      "sparsemla");
  app.set_version_flag("--version", std::string(Version()));
  app.require_subcommand(0, 1);
  int exit_code = kExitOk;
  std::string command_line;
  for (int i = 0; i < argc; ++i) command_line += (i == 0 ? "" : " ") + std::string(argv[i]);
  RegisterBench(app, exit_code, command_line);
  RegisterInfo(app, exit_code);
  RegisterPlan(app, exit_code);
  RegisterReplay(app, exit_code);
  RegisterRun(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return BadInput(error.what());
  }
  if (app.get_subcommands().empty()) {
    return BadInput("a subcommand is required, see sparsemla --help");
  }
  // A full disk or a closed pipe must not look like success.
  if (std::fflush(stdout) != 0) return BadInput("cannot write to the standard output");
  return exit_code;
}

}  // namespace
}  // namespace sparsemla::tools

int main(int argc, char** argv) {
  try {
    return sparsemla::tools::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    return sparsemla::tools::BadInput("not enough memory");
  } catch (const std::exception& error) {
    return sparsemla::tools::BadInput(error.what());
  }
}
