/*
 * SHMQ_PLANTED(n): is fault n built in? Not in a release; in a build with SHMQ_PLANTS the test that
 * shows that each is found (tests/kill/kill_plants.c) says which: a store left out, or two swapped.
 */
#ifndef SHMQ_PLANT_H
#define SHMQ_PLANT_H

#ifdef SHMQ_PLANTS
extern unsigned shmq_planted; /* the test's */
#define SHMQ_PLANTED(n) (shmq_planted == (n))
#else
#define SHMQ_PLANTED(n) 0
#endif

#endif
