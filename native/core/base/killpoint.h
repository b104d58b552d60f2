/*
 * SHMQ_KILLPOINT(name) marks a place between two stores that belong together. It is empty in a
 * release. In a killpoints build the process kills itself there when the name is armed. Tests are
 * parametrised over the names found in these sources.
 */
#ifndef SHMQ_KILLPOINT_H
#define SHMQ_KILLPOINT_H

#ifdef SHMQ_KILLPOINTS
void shmq_killpoint_pass(const char *name);
#define SHMQ_KILLPOINT(name) shmq_killpoint_pass(name)
#else
#define SHMQ_KILLPOINT(name) ((void)0)
#endif

#endif
