# cmake -DPATCH=<file> -DCORE=<native/core> -DTO=<directory> -P apply.cmake: a copy of the core with the patch's fault.
file(REMOVE_RECURSE "${TO}")
file(COPY "${CORE}/" DESTINATION "${TO}" FILES_MATCHING PATTERN "*.[ch]")
execute_process(COMMAND patch --quiet --fuzz=0 -p3 -d "${TO}" -i "${PATCH}"
                RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(failed)
  message(FATAL_ERROR "${PATCH} no longer applies to native/core: make the change that its first line "
          "describes in a copy of the file, write the patch again with 'diff -U2' below its header, and "
          "see that the check it names still finds it. patch says:\n${said}")
endif()
file(GLOB_RECURSE copies "${TO}/*.[ch]")
file(TOUCH ${copies}) # a copy keeps its time, and would be older than the patch
