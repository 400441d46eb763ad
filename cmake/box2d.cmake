# envfleet/_native/libenvfleet_box2d.so: the environments on the system's Box2D. It is loaded when one of them is made
# (envfleet.pool.simulators.box2d), and needs libbox2d.so.2 there.
find_package(box2d 2.4 CONFIG QUIET)
if(NOT box2d_FOUND)
  message(NOTICE "no Box2D (Debian: libbox2d-dev): its environments will run as Python processes, and have no test in C++")
  return()
endif()
message(STATUS "Box2D ${box2d_VERSION}: ${box2d_DIR}")

if(ENVFLEET_NATIVE_TESTS)
  envfleet_add_test(box2d native/tests/plugins/box2d_test.cc native/envs/box2d/plugin.cc)
  target_link_libraries(box2d_test PRIVATE box2d::box2d)
  return()
endif()

add_library(envfleet_box2d MODULE native/envs/box2d/plugin.cc)
target_compile_definitions(envfleet_box2d PRIVATE ENVFLEET_PLUGIN_ABI=0x${hash}u)
target_include_directories(envfleet_box2d PRIVATE native ${Python_NumPy_INCLUDE_DIRS})
target_link_libraries(envfleet_box2d PRIVATE box2d::box2d ${ENVFLEET_NPYRANDOM})
set_target_properties(envfleet_box2d PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                                                SKIP_BUILD_RPATH ON)
install(TARGETS envfleet_box2d LIBRARY DESTINATION envfleet/_native)
