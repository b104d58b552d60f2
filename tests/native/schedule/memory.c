/* Segments, heap and clock, which are put back before every run. */
#include "scheduler.h"

#include <sys/stat.h>

#define HEAP (8u << 20)

#define PAGE 4096u

#define SEGMENTS 16

static struct segment {
	uint8_t *base;
	size_t size;
	dev_t device;
	ino_t inode;
} segments[SEGMENTS];

static uint32_t segment_count;

static uint8_t heap_memory[HEAP] __attribute__((aligned(PAGE)));

static size_t heap_used;

static struct page {
	uint8_t *at, *copy;
} *pages;

static size_t page_count, heap_begin;

int64_t ticks;
static int64_t ticks_begin;

void *schedule_alloc(size_t size)
{
	void *p = heap_memory + heap_used;

	heap_used += (size + 63) / 64 * 64;
	if (heap_used > HEAP)
		schedule_fail("the test's heap is too small");
	memset(p, 0, size);
	return p;
}

/* The same place for everybody, so that an address says what is accessed. */
void *schedule_map(size_t size, int fd)
{
	struct stat s;

	if (fstat(fd, &s))
		return MAP_FAILED;
	for (uint32_t i = 0; i < segment_count; i++)
		if (segments[i].device == s.st_dev && segments[i].inode == s.st_ino)
			return segments[i].base;
	if (segment_count == SEGMENTS)
		return MAP_FAILED;
	segments[segment_count] = (struct segment){
		mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), size, s.st_dev, s.st_ino};
	return segments[segment_count++].base;
}

static void keep(uint8_t *at)
{
	pages = realloc(pages, (page_count + 1) * sizeof(*pages));
	pages[page_count].at = at;
	pages[page_count].copy = malloc(PAGE);
	memcpy(pages[page_count++].copy, at, PAGE);
}

void schedule_begin(void)
{
	for (uint32_t i = 0; i < segment_count; i++) {
		size_t n = segments[i].size / PAGE;
		unsigned char *resident = malloc(n);

		if (mincore(segments[i].base, segments[i].size, resident))
			abort();
		for (size_t p = 0; p < n; p++)
			if (resident[p] & 1)
				keep(segments[i].base + p * PAGE);
		free(resident);
	}
	for (size_t at = 0; at < heap_used; at += PAGE)
		keep(heap_memory + at);
	heap_begin = heap_used;
	ticks_begin = ticks;
}

void memory_restore(void)
{
	for (size_t i = 0; i < page_count; i++)
		memcpy(pages[i].at, pages[i].copy, PAGE);
	heap_used = heap_begin;
	ticks = ticks_begin;
}

void memory_forget(void)
{
	for (size_t i = 0; i < page_count; i++)
		free(pages[i].copy);
	page_count = 0;
	for (uint32_t i = 0; i < segment_count; i++)
		munmap(segments[i].base, segments[i].size);
	segment_count = 0;
	heap_used = 0;
	ticks = 0;
}

/* Time passes by being asked for. */
int schedule_clock(clockid_t clock, struct timespec *t)
{
	int64_t ns = (clock == CLOCK_REALTIME ? INT64_C(1781000000) : INT64_C(1000)) * NS_PER_S +
	             ++ticks * 1000;

	*t = timespec_of(ns);
	return 0;
}
