# What every target of this project has in common: warnings, sanitizers, no extensions.

function(sparsemla_target_defaults target)
  set_target_properties(${target} PROPERTIES
    CXX_STANDARD 20
    CXX_STANDARD_REQUIRED ON
    CXX_EXTENSIONS OFF
    POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wpedantic -Wconversion -Wshadow
    $<$<BOOL:${SPARSEMLA_WERROR}>:-Werror>)
  if(SPARSEMLA_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${SPARSEMLA_SANITIZE}
                           -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(${target} PRIVATE -fsanitize=${SPARSEMLA_SANITIZE})
  endif()
endfunction()
