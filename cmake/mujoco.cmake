# envfleet/_native/libenvfleet_mujoco-VERSION.so: the environments on MuJoCo, for exactly that version of its library. It is
# loaded when one of them is made (envfleet.pool.simulators.mujoco), and finds the library of the installed wheel by its name.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u; s = u.find_spec('mujoco'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE ENVFLEET_MUJOCO_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
file(GLOB ENVFLEET_LIBMUJOCO ${ENVFLEET_MUJOCO_DIR}/libmujoco.so.*)
if(NOT ENVFLEET_MUJOCO_DIR OR NOT ENVFLEET_LIBMUJOCO)
  message(NOTICE "no MuJoCo (pip: mujoco-core): its environments will run as Python processes, and have no test in C++")
  return()
endif()
list(GET ENVFLEET_LIBMUJOCO 0 ENVFLEET_LIBMUJOCO)
string(REGEX REPLACE ".*/libmujoco\\.so\\." "" ENVFLEET_MUJOCO_VERSION ${ENVFLEET_LIBMUJOCO})
message(STATUS "MuJoCo ${ENVFLEET_MUJOCO_VERSION}: ${ENVFLEET_MUJOCO_DIR}")

if(ENVFLEET_NATIVE_TESTS)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; s = u.find_spec('gymnasium'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE ENVFLEET_GYMNASIUM_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT ENVFLEET_GYMNASIUM_DIR)
    message(NOTICE "no Gymnasium, which has the models: the environments on MuJoCo have no test in C++")
    return()
  endif()
  envfleet_add_test(mujoco native/tests/plugins/mujoco_test.cc native/envs/mujoco/plugin.cc)
  target_compile_definitions(mujoco_test PRIVATE
                             ENVFLEET_MUJOCO_MODELS="${ENVFLEET_GYMNASIUM_DIR}/envs/mujoco/assets")
  target_include_directories(mujoco_test SYSTEM PRIVATE ${ENVFLEET_MUJOCO_DIR}/include)
  target_link_libraries(mujoco_test PRIVATE ${ENVFLEET_LIBMUJOCO})
  return()
endif()

add_library(envfleet_mujoco MODULE native/envs/mujoco/plugin.cc)
target_compile_definitions(envfleet_mujoco PRIVATE ENVFLEET_PLUGIN_ABI=0x${hash}u)
target_include_directories(envfleet_mujoco PRIVATE native ${Python_NumPy_INCLUDE_DIRS})
target_include_directories(envfleet_mujoco SYSTEM PRIVATE ${ENVFLEET_MUJOCO_DIR}/include)
target_link_libraries(envfleet_mujoco PRIVATE ${ENVFLEET_LIBMUJOCO} ${ENVFLEET_NPYRANDOM})
set_target_properties(
  envfleet_mujoco
  PROPERTIES OUTPUT_NAME envfleet_mujoco-${ENVFLEET_MUJOCO_VERSION}
             CXX_VISIBILITY_PRESET hidden
             VISIBILITY_INLINES_HIDDEN ON
             SKIP_BUILD_RPATH ON)  # whoever loads it has loaded MuJoCo's library before
install(TARGETS envfleet_mujoco LIBRARY DESTINATION envfleet/_native)
