/* The details of a failure: one sentence per thread, which shmq_error_detail returns. */
#ifndef SHMQ_STATUS_H
#define SHMQ_STATUS_H

/* Store the details of this thread's failure. Returns `status`. */
int fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void error_clear(void);

#endif
