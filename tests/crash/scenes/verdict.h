/* A scene in which a process has died is repaired by the next one that comes, and then judged. */
#ifndef VERDICT_H
#define VERDICT_H

#include "image.h"
#include "scene.h"

/* The process that comes first after a death. */
enum comer { THE_REAPER, A_PUBLISHER, A_CONSUMER, COMERS };

/* Come as such a process and repair. Call it in a process of its own. */
void repair(scene *s, enum comer first);
/*
 * Repair, then hold everything to its promises, in a forked child. `others` are the locks of the
 * clients that live on; half-way they die too. The scene's bytes are used up. Returns false if a
 * promise is broken; wrong_words say which.
 */
bool verdict(const scene *s, enum comer first, const marks *others);

#endif
