/*
 * The bytes of all segments at one moment, and what the kernel would add if a process died then:
 * the owner-died marks in the robust locks it holds.
 */
#ifndef IMAGE_H
#define IMAGE_H

#include "scene.h"

#include <sys/stat.h>

#define EXTENTS 64u

typedef struct image {
	struct {
		uint8_t *bytes; /* SPAN of address space; pages as in the file */
		off_t size;
		blkcnt_t blocks;
		uint32_t extents; /* parts that have pages */
		struct {
			off_t from, to;
		} extent[EXTENTS];
	} file[FILES];
} image;

void image_make(image *i);
/* Copy what has changed in the files; returns true if anything had. It skips the entries of the
 * directory's tables that cannot have been used yet; files_differ looks at everything. */
bool image_follow(image *i, const files *f);
/* Make the files what the image is. */
void image_put(const image *i, const files *f);
/* The first place where both sets of files differ; false: nowhere. */
bool files_differ(const files *x, const files *y, uint32_t *file, uint64_t *at);

/* Lock words that name a thread as their owner and are in its robust list, or about to be. */
typedef struct marks {
	int32_t thread;
	uint32_t count;
	struct {
		uint32_t file;
		uint64_t at;
	} word[32];
} marks;

/* Of a stopped thread of ours; `look`: it, or its mappings, are not those of the last time. */
void marks_read(marks *m, pid_t thread, const files *f, bool look);
/* Returns true if the thread's own part of its list has changed since the last look. The rest is in
 * the segments. */
bool marks_stale(pid_t thread);
/* Do to each word as exit_robust_list does (kernel/futex/core.c): the waiters' bit stays. */
void marks_apply(const marks *m, const files *f);

#endif
