/* Checking a name. */
#ifndef SHMQ_NAMES_H
#define SHMQ_NAMES_H

#include <stdbool.h>

bool name_ok(const char *name);

#endif
