# Scripts, styles and sources that the program's pages show, as strings of the program (commands/page.h). A page allows
# exactly these scripts, by their hashes.
set(resources pages/page.css pages/page.js pages/chart.js pages/walk.js pages/step.js pages/report.js pages/certificate.js streambp.cuh)
set(strings "#include \"commands/page.h\"\n\nconst std::vector<streambp::Resource> streambp::kResources = {\n")
foreach(resource ${resources})
  file(READ ${PROJECT_SOURCE_DIR}/${resource} text)
  string(SHA256 hash "${text}")
  get_filename_component(name ${resource} NAME)
  string(APPEND strings "{\"${name}\", \"${hash}\", R\"resource(${text})resource\"},\n")
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${resources})
file(WRITE ${PROJECT_BINARY_DIR}/pages.cpp.new "${strings}};\n")
configure_file(${PROJECT_BINARY_DIR}/pages.cpp.new ${PROJECT_BINARY_DIR}/pages.cpp COPYONLY)
