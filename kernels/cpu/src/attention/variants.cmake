# ATTENTION_SOURCES: block attention for this processor architecture. LOOP_SOURCES: what the host does around it. Each
# variant's file is compiled for its own instruction set, and only for that: nothing may need the machine that compiles.
function(attention_flags file)
  set_source_files_properties(src/attention/${file} PROPERTIES COMPILE_OPTIONS "-O3;${ARGN}")
endfunction()
function(loop_flags file)
  set_source_files_properties(src/host/${file} PROPERTIES COMPILE_OPTIONS "-O3;-ffp-contract=fast;-fno-math-errno;${ARGN}")
endfunction()

set(ATTENTION_SOURCES src/attention/dispatch.cpp src/attention/masked.cpp src/attention/portable.cpp
    src/attention/halves_portable.cpp)
attention_flags(portable.cpp)
attention_flags(halves_portable.cpp)
set(LOOP_SOURCES src/host/loops_portable.cpp)
loop_flags(loops_portable.cpp)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(AVX512_FLAGS -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512
      -Wno-uninitialized -Wno-maybe-uninitialized)  # GCC before 13 warns of its own AVX-512 headers (bug 105593)
  attention_flags(avx2.cpp -mavx2 -mfma -mf16c)
  attention_flags(halves_avx2.cpp -mavx2 -mfma -mf16c)
  attention_flags(avx512.cpp ${AVX512_FLAGS})
  attention_flags(halves_avx512.cpp ${AVX512_FLAGS})
  attention_flags(amx.cpp ${AVX512_FLAGS} -mamx-tile -mamx-bf16)
  loop_flags(loops_avx2.cpp -mavx2 -mfma -mf16c)
  loop_flags(loops_avx512.cpp ${AVX512_FLAGS})
  list(APPEND LOOP_SOURCES src/host/loops_avx2.cpp src/host/loops_avx512.cpp)
  list(APPEND ATTENTION_SOURCES
       src/attention/detect_x86_64.cpp src/attention/avx2.cpp src/attention/avx512.cpp src/attention/amx.cpp
       src/attention/halves_avx2.cpp src/attention/halves_avx512.cpp)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  attention_flags(neon.cpp -march=armv8-a)
  attention_flags(halves_neon.cpp -march=armv8-a)
  attention_flags(neon_bf16.cpp -march=armv8.2-a+bf16)
  list(APPEND ATTENTION_SOURCES
       src/attention/detect_aarch64.cpp src/attention/neon.cpp src/attention/neon_bf16.cpp
       src/attention/halves_neon.cpp)
else()
  list(APPEND ATTENTION_SOURCES src/attention/detect_other.cpp)
endif()
