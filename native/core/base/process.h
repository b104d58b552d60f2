/* Identifying processes. A process is its pid AND its start time; a program is also the start of
 * its stack, which an exec changes. */
#ifndef SHMQ_PROCESS_H
#define SHMQ_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct process_identity {
	uint64_t start_time; /* clock ticks since boot; 0: no such process */
	uint64_t program;    /* start of its stack, changes with exec; 0: not readable */
} process_identity;

process_identity process_identify(pid_t pid);
/* Returns false only if the kernel says that the thread's process maps no part of the file that this
 * process has mapped at `address`. True if it does, if nothing is mapped there, if the memory has no
 * file, and if the kernel does not tell (another user's process, no proc file system). */
bool process_may_map(pid_t thread, const void *address);
uint64_t pid_namespace_inode(void);
void boot_identity(uint64_t out[2]);
/* Returns false if the kernel gives none. */
bool random_bits(uint64_t out[2]);
void random_identity(uint64_t out[2]);

#endif
