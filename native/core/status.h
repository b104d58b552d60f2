/* The sentence behind a status: one per thread, for the caller of the library. */
#ifndef SHMQ_STATUS_H
#define SHMQ_STATUS_H

int because(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void because_nothing(void);

#endif
