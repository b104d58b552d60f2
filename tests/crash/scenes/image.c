#include "image.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE ((off_t)4096)

void image_make(image *i)
{
	memset(i, 0, sizeof(*i));
	for (uint32_t f = 0; f < FILES; f++) {
		i->file[f].bytes = mmap(NULL, SPAN, PROT_READ | PROT_WRITE,
		                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		CHECK(i->file[f].bytes != MAP_FAILED);
	}
}

/* Reading a hole through a mapping would make a page of it. */
static bool extents_follow(image *i, const files *f, uint32_t k)
{
	struct stat now;
	uint32_t n = 0;

	CHECK(!fstat(f->fd[k], &now));
	if (now.st_size == i->file[k].size && now.st_blocks == i->file[k].blocks)
		return false;
	CHECK(now.st_size <= SPAN);
	/* A hole may later get another page. */
	madvise(i->file[k].bytes, SPAN, MADV_DONTNEED);
	for (off_t to = 0; to < now.st_size; n++) {
		off_t from = lseek(f->fd[k], to, SEEK_DATA);

		if (from < 0)
			break;
		to = lseek(f->fd[k], from, SEEK_HOLE);
		CHECK(n < EXTENTS && to > from);
		i->file[k].extent[n].from = from;
		i->file[k].extent[n].to = (to + PAGE - 1) / PAGE * PAGE;
	}
	i->file[k].extents = n;
	i->file[k].size = now.st_size;
	i->file[k].blocks = now.st_blocks;
	return true;
}

static bool part_follow(image *i, const files *f, uint32_t k, off_t from, off_t to)
{
	bool changed = false;

	for (off_t at = from; at < to; at += PAGE)
		if (memcmp(i->file[k].bytes + at, f->map[k] + at, (size_t)PAGE)) {
			memcpy(i->file[k].bytes + at, f->map[k] + at, (size_t)PAGE);
			changed = true;
		}
	return changed;
}

/* Where a table's unused entries begin, if `at` lies in them: 384 KiB that never change. */
static off_t behind_the_unused(const files *f, off_t at)
{
	const shmq_directory_desc *d = (const void *)f->map[0];
	off_t waiters = (off_t)d->waiters_at + PAGE, deadline = (off_t)d->deadline_at + PAGE;
	off_t due = (off_t)d->due_at + PAGE;

	if (at >= waiters && at < (off_t)d->clients_at)
		return (off_t)d->clients_at;
	if (at >= deadline && at < (off_t)d->due_at)
		return (off_t)d->due_at;
	return at >= due && at < (off_t)d->writers_at ? (off_t)d->writers_at : at;
}

bool image_follow(image *i, const files *f)
{
	bool changed = false;

	for (uint32_t k = 0; k < FILES; k++) {
		bool grown = extents_follow(i, f, k), all = grown || k;

		changed |= grown;
		for (uint32_t e = 0; e < i->file[k].extents; e++)
			for (off_t at = i->file[k].extent[e].from; at < i->file[k].extent[e].to; at += PAGE) {
				if (!all)
					at = behind_the_unused(f, at);
				if (at < i->file[k].extent[e].to)
					changed |= part_follow(i, f, k, at, at + PAGE);
			}
	}
	return changed;
}

static void punch(const image *i, const files *f, uint32_t k)
{
	off_t at = 0;

	for (uint32_t e = 0; e <= i->file[k].extents; e++) {
		off_t to = e < i->file[k].extents ? i->file[k].extent[e].from : i->file[k].size;

		if (to > at)
			CHECK(!fallocate(f->fd[k], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, to - at));
		if (e < i->file[k].extents)
			at = i->file[k].extent[e].to;
	}
}

void image_put(const image *i, const files *f)
{
	for (uint32_t k = 0; k < FILES; k++) {
		struct stat now;

		CHECK(!fstat(f->fd[k], &now));
		if (now.st_size != i->file[k].size)
			CHECK(!ftruncate(f->fd[k], i->file[k].size));
		for (uint32_t e = 0; e < i->file[k].extents; e++)
			for (off_t at = i->file[k].extent[e].from; at < i->file[k].extent[e].to; at += PAGE)
				if (memcmp(f->map[k] + at, i->file[k].bytes + at, (size_t)PAGE))
					memcpy(f->map[k] + at, i->file[k].bytes + at, (size_t)PAGE);
		CHECK(!fstat(f->fd[k], &now));
		if (now.st_blocks != i->file[k].blocks)
			punch(i, f, k);
	}
}

bool files_differ(const files *x, const files *y, uint32_t *file, uint64_t *at)
{
	for (uint32_t k = 0; k < FILES; k++) {
		struct stat s, t;
		off_t from = 0;

		CHECK(!fstat(x->fd[k], &s) && !fstat(y->fd[k], &t));
		*file = k;
		*at = 0;
		if (s.st_size != t.st_size || s.st_blocks != t.st_blocks)
			return true;
		while ((from = lseek(x->fd[k], from, SEEK_DATA)) >= 0) {
			off_t to = lseek(x->fd[k], from, SEEK_HOLE);

			for (; from < to; from++)
				if (x->map[k][from] != y->map[k][from]) {
					*at = (uint64_t)from;
					return true;
				}
		}
	}
	return false;
}

/* ---- marks ---- */

typedef struct mapping {
	uint64_t from, to, offset;
	uint32_t file;
} mapping;

static mapping mappings[64];
static uint32_t mapping_count;

static void mappings_read(pid_t process, const files *f)
{
	struct stat s[FILES];
	char path[32], line[512];
	FILE *maps;

	for (uint32_t k = 0; k < FILES; k++)
		CHECK(!fstat(f->fd[k], &s[k]));
	snprintf(path, sizeof(path), "/proc/%d/maps", (int)process);
	maps = fopen(path, "re");
	CHECK(maps);
	mapping_count = 0;
	while (fgets(line, sizeof(line), maps)) {
		unsigned long from, to, offset, inode;

		if (sscanf(line, "%lx-%lx %*s %lx %*s %lu", &from, &to, &offset, &inode) != 4)
			continue;
		for (uint32_t k = 0; k < FILES; k++)
			if (s[k].st_ino == inode && strstr(line, "memfd:segment")) {
				CHECK(mapping_count < sizeof(mappings) / sizeof(mappings[0]));
				mappings[mapping_count++] = (mapping){from, to, offset, k};
			}
	}
	fclose(maps);
}

static void peek(pid_t process, uint64_t at, void *value, size_t size)
{
	struct iovec to = {value, size}, from = {(void *)(uintptr_t)at, size};

	if (process_vm_readv(process, &to, 1, &from, 1, 0) != (ssize_t)size)
		wrong("the tracer cannot read %llx of process %d: %s", (unsigned long long)at, (int)process,
		      strerror(errno));
}

/* As handle_futex_death: only a word that names the dead thread, in any list. */
static void mark_add(marks *m, pid_t thread, const files *f, uint64_t address)
{
	uint32_t word;

	for (uint32_t i = 0; i < mapping_count; i++) {
		uint64_t at = address - mappings[i].from + mappings[i].offset;

		if (address < mappings[i].from || address >= mappings[i].to)
			continue;
		memcpy(&word, f->map[mappings[i].file] + at, sizeof(word));
		if ((word & FUTEX_TID_MASK) != (uint32_t)thread)
			return;
		CHECK(m->count < sizeof(m->word) / sizeof(m->word[0]));
		m->word[m->count].file = mappings[i].file;
		m->word[m->count++].at = at;
		return;
	}
	/* Of private memory: nobody else's business. */
}

/* The head of a thread's list lies in its own memory. */
typedef struct list_head {
	uint64_t first, offset, pending;
} list_head;

static uint64_t head_at;
static list_head head_seen;

static void head_find(pid_t thread)
{
	bool own = thread == (pid_t)syscall(SYS_gettid);
	struct robust_list_head *head;
	size_t length;

	if (syscall(SYS_get_robust_list, own ? 0 : thread, &head, &length) || !head)
		wrong("get_robust_list of %d: %s", (int)thread, strerror(errno));
	head_at = (uint64_t)(uintptr_t)head;
}

bool marks_stale(pid_t thread)
{
	list_head now;

	peek(thread, head_at, &now, sizeof(now));
	return memcmp(&now, &head_seen, sizeof(now)) != 0;
}

void marks_read(marks *m, pid_t thread, const files *f, bool look)
{
	uint64_t entry, pending;

	if (look) {
		mappings_read(thread, f);
		head_find(thread);
	}
	memset(m, 0, sizeof(*m));
	m->thread = thread;
	peek(thread, head_at, &head_seen, sizeof(head_seen));
	pending = head_seen.pending & ~UINT64_C(1); /* bit 0: priority inheritance */
	entry = head_seen.first & ~UINT64_C(1);
	for (uint32_t i = 0; entry != head_at; i++) {
		CHECK(i < 64);
		if (entry != pending)
			mark_add(m, thread, f, entry + head_seen.offset);
		peek(thread, entry, &entry, sizeof(entry));
		entry &= ~UINT64_C(1);
	}
	if (pending)
		mark_add(m, thread, f, pending + head_seen.offset);
}

void marks_apply(const marks *m, const files *f)
{
	for (uint32_t i = 0; i < m->count; i++) {
		uint32_t *word = (uint32_t *)(void *)(f->map[m->word[i].file] + m->word[i].at);

		if ((*word & FUTEX_TID_MASK) == (uint32_t)m->thread)
			*word = (*word & FUTEX_WAITERS) | FUTEX_OWNER_DIED;
	}
}
