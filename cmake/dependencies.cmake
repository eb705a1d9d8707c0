# The libraries that streambp needs: the system's, or built here as a static library from fetched sources.
#
#   STREAMBP_FETCH=AUTO       fetches what the system lacks; ON fetches all of them, OFF none
#   STREAMBP_ARCHIVES=DIR     the folder of the archives; what is not there is downloaded into it
#
# Makes the target `dependencies`, and one for each of them. The fetched versions are those of Debian 12, with which
# everything is tested: tokenizers depend on their Unicode tables.

set(STREAMBP_FETCH AUTO CACHE STRING "Build libraries from fetched sources: AUTO (those that are not installed), ON or OFF")
set(STREAMBP_ARCHIVES ${CMAKE_BINARY_DIR}/archives CACHE PATH "The folder of these sources; what is not there is downloaded")
if(NOT STREAMBP_FETCH MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "STREAMBP_FETCH is ${STREAMBP_FETCH}; choose AUTO, ON or OFF.")
endif()
set(fetched ${CMAKE_BINARY_DIR}/fetched)
include(cmake/fetch.cmake)
set(fetched_names "")
set(fetched_sources "")

function(missing what package)
  message(FATAL_ERROR "${what} was not found. On Debian or Ubuntu: apt-get install ${package} "
                      "(scripts/setup.sh installs everything that is needed).")
endfunction()

# A library: the Debian PACKAGE that has it; the HEADER and LIBRARY to look for; URL and SHA256 of the archive, and in it
# the public HEADERS, and SOURCES that match none of EXCEPT.
function(dependency name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PACKAGE;HEADER;LIBRARY;URL;SHA256;EXCEPT" "HEADERS;SOURCES;DEFINITIONS")
  string(REGEX REPLACE "-.*" "" short ${name})
  string(TOUPPER ${short} prefix)
  set(found 0)
  if(NOT STREAMBP_FETCH STREQUAL "ON")
    find_path(${prefix}_INCLUDE ${arg_HEADER})
    set(found "${${prefix}_INCLUDE}")
    if(arg_LIBRARY)
      find_library(${prefix}_LIBRARY ${arg_LIBRARY})
      if(NOT ${prefix}_LIBRARY)
        set(found 0)
      endif()
    endif()
  endif()
  add_library(${short} INTERFACE)
  target_link_libraries(dependencies INTERFACE ${short})
  set(dependencies ${dependencies} ${short} PARENT_SCOPE)
  if(found)
    if(arg_LIBRARY OR short STREQUAL "json")
      target_include_directories(${short} SYSTEM INTERFACE ${found})
      target_link_libraries(${short} INTERFACE ${${prefix}_LIBRARY})
    else()  # only the program needs it
      target_include_directories(${short} SYSTEM INTERFACE $<BUILD_INTERFACE:${found}>)
    endif()
    return()
  elseif(STREAMBP_FETCH STREQUAL "OFF")
    missing(${short} ${arg_PACKAGE})
  endif()
  fetch(${name} ${arg_URL} ${arg_SHA256})
  target_include_directories(${short} SYSTEM INTERFACE $<BUILD_INTERFACE:${fetched}/include>
                                                       $<INSTALL_INTERFACE:include/streambp/fetched>)
  list(TRANSFORM arg_HEADERS PREPEND ${fetched}/${name}/)
  list(TRANSFORM arg_SOURCES PREPEND ${fetched}/${name}/)
  get_filename_component(folder ${fetched}/include/${arg_HEADER} DIRECTORY)
  file(GLOB headers ${arg_HEADERS})
  file(COPY ${headers} DESTINATION ${folder})
  if(arg_SOURCES)
    file(GLOB sources ${arg_SOURCES})
    if(arg_EXCEPT)
      list(FILTER sources EXCLUDE REGEX "${arg_EXCEPT}")
    endif()
    target_link_libraries(${short} INTERFACE fetched)
    set_source_files_properties(${sources} PROPERTIES COMPILE_DEFINITIONS "${arg_DEFINITIONS}")
  endif()
  set(fetched_names ${fetched_names} ${name} PARENT_SCOPE)
  set(fetched_sources ${fetched_sources} ${sources} PARENT_SCOPE)
endfunction()

find_package(OpenMP COMPONENTS CXX QUIET)
if(NOT OpenMP_CXX_FOUND)
  missing("OpenMP" g++)
endif()
find_package(Threads REQUIRED)

# MPI connects the processes of a run. Without it, a run has one process.
option(STREAMBP_MPI "Connect processes by MPI, if it is installed" ON)
if(STREAMBP_MPI)
  find_package(MPI COMPONENTS C QUIET)
endif()
set(with_mpi 0)
if(STREAMBP_MPI AND MPI_C_FOUND)
  set(with_mpi 1)
  message(STATUS "Processes: connected by MPI ${MPI_C_VERSION}")
else()
  message(STATUS "Processes: one; without MPI (on Debian or Ubuntu: apt-get install libopenmpi-dev)")
endif()

add_library(dependencies INTERFACE)
set(github https://github.com)
dependency(CLI11-2.1.2 PACKAGE libcli11-dev HEADER CLI/CLI.hpp HEADERS include/CLI/*.hpp
  URL ${github}/CLIUtils/CLI11/archive/refs/tags/v2.1.2.tar.gz
  SHA256 26291377e892ba0e5b4972cdfd4a2ab3bf53af8dac1f4ea8fe0d1376b625c8cb)
dependency(json-3.11.2 PACKAGE nlohmann-json3-dev HEADER nlohmann/json.hpp HEADERS single_include/nlohmann/*.hpp
  URL ${github}/nlohmann/json/archive/refs/tags/v3.11.2.tar.gz
  SHA256 d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273)
dependency(pcre2-10.42 PACKAGE libpcre2-dev HEADER pcre2.h LIBRARY pcre2-8 HEADERS src/pcre2.h SOURCES src/pcre2_*.c
  EXCEPT "_(dftables|fuzzsupport|jit_match|jit_misc|jit_test|printint|ucptables)[.]c$"
  DEFINITIONS HAVE_CONFIG_H PCRE2_CODE_UNIT_WIDTH=8 SUPPORT_PCRE2_8 SUPPORT_UNICODE SUPPORT_JIT HAVE_MEMMOVE
  URL ${github}/PCRE2Project/pcre2/releases/download/pcre2-10.42/pcre2-10.42.tar.gz
  SHA256 c33b418e3b936ee3153de2c61cc638e7e4fe3156022a5c77d0711bcbb9d64f1f)
dependency(utf8proc-2.8.0 PACKAGE libutf8proc-dev HEADER utf8proc.h LIBRARY utf8proc HEADERS utf8proc.h
  SOURCES utf8proc.c
  URL ${github}/JuliaStrings/utf8proc/archive/refs/tags/v2.8.0.tar.gz
  SHA256 a0a60a79fe6f6d54e7d411facbfcc867a6e198608f2cd992490e46f04b1bcecc)
dependency(zlib-1.2.13 PACKAGE zlib1g-dev HEADER zlib.h LIBRARY z HEADERS zlib.h zconf.h SOURCES *.c
  DEFINITIONS HAVE_UNISTD_H
  URL ${github}/madler/zlib/archive/refs/tags/v1.2.13.tar.gz
  SHA256 1525952a0a567581792613a9723333d7f8cc20b87a81f920fb8bc7e3f2251428)
dependency(zstd-1.5.4 PACKAGE libzstd-dev HEADER zstd.h LIBRARY zstd HEADERS lib/zstd.h lib/zstd_errors.h
  SOURCES lib/common/*.c lib/compress/*.c lib/decompress/*.c DEFINITIONS ZSTD_DISABLE_ASM XXH_NAMESPACE=ZSTD_
  URL ${github}/facebook/zstd/archive/refs/tags/v1.5.4.tar.gz
  SHA256 35ad983197f8f8eb0c963877bf8be50490a0b3df54b4edeb8399ba8a8b2f60a4)
dependency(xxHash-0.8.1 PACKAGE libxxhash-dev HEADER xxhash.h LIBRARY xxhash HEADERS xxhash.h SOURCES xxhash.c
  URL ${github}/Cyan4973/xxHash/archive/refs/tags/v0.8.1.tar.gz
  SHA256 3bb6b7d6f30c591dd65aaaff1c8b7a5b94d81687998ca9400082c739a690436c)

if(fetched_names)
  list(JOIN fetched_names ", " names)
  message(STATUS "Libraries: built from sources: ${names}")
endif()
if(fetched_sources)
  add_library(fetched STATIC ${fetched_sources})
  target_compile_options(fetched PRIVATE -w)
  set_target_properties(fetched PROPERTIES OUTPUT_NAME streambp_fetched)
endif()
