//! What the bytes of each file should be: an append-only file of JSON lines (see [`super::table`]).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use super::disk::Disk;
use super::disk::DiskFile;
use super::disk::How;
use super::disk::read_vec;
use super::disk::remove_any;
use super::error::full;
use super::lock;
use super::table::Line;
use super::table::Mark;
use super::table::Subject;
use super::table::Table;
use super::table::Told;
use super::table::written;

#[derive(Debug)]
enum Pending {
    /// The line is written, the file not yet published.
    Writing,
    Published(PathBuf),
    /// The file was not published after all.
    Nothing,
}

#[derive(Debug, Default)]
pub(super) struct Tail {
    /// Shared, so that it can be synced while others append to it.
    pub(super) file: Option<Arc<dyn DiskFile>>,
    /// Which file that is.
    id: u64,
    /// An append failed and may have left half a line.
    pub(super) broken: bool,
    next: u64,
    pending: BTreeMap<u64, Pending>,
}

/// One model's digests.
#[derive(Debug)]
pub(super) struct DigestLog {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) path: PathBuf,
    by: String,
    /// The folders above the log, up to the one that holds the home.
    above: Vec<PathBuf>,
    /// Whether those are safe from a power loss.
    rooted: AtomicBool,
    /// Locked after `tail`, where both are.
    pub(super) table: Mutex<Option<Table>>,
    pub(super) tail: Mutex<Tail>,
    /// Lines from which on it is worth looking how many are live.
    pub(super) look_at: AtomicU64,
    /// The disk had no room for the mark of an unclean stop: this process remembers it.
    unmarked: AtomicBool,
}

impl DigestLog {
    /// The log of the model in `folder`, which lies somewhere below `home`.
    pub(super) fn new(disk: Arc<dyn Disk>, home: &Path, folder: &Path, session: u64) -> Self {
        let in_home = folder.ancestors().take_while(|f| f.starts_with(home));
        let above = in_home.chain(home.parent()).map(Path::to_owned);
        DigestLog {
            disk,
            path: folder.join("digests"),
            by: format!("{session:016x}"),
            above: above.collect(),
            rooted: AtomicBool::new(false),
            table: Mutex::default(),
            tail: Mutex::default(),
            look_at: AtomicU64::new(0),
            unmarked: AtomicBool::new(false),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Asks the table; reads the file first, or what others have added to it since, if the table
    /// does not know.
    pub(super) fn get(&self, subject: &Subject) -> io::Result<Option<Told>> {
        let mut table = lock(&self.table);
        if let Some(told) = table.as_ref().and_then(|t| t.tell(subject)) {
            return Ok(Some(told));
        }
        self.refresh(&mut table)?;
        Ok(table.as_ref().and_then(|t| t.tell(subject)))
    }

    pub(super) fn refresh(&self, table: &mut Option<Table>) -> io::Result<()> {
        let known = table.get_or_insert_default();
        let file = match self.disk.open(&self.path, How::Read) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            // A folder in its place vouches for nothing; whoever writes next puts it away.
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => return Ok(()),
            Err(e) => return Err(e),
        };
        let facts = file.facts()?;
        if facts.id != known.file || facts.len < known.read_to {
            // It was rewritten, or cut.
            *known = Table::default();
            known.file = facts.id;
        }
        let fresh =
            usize::try_from(facts.len - known.read_to).map_err(|_| io::ErrorKind::FileTooLarge)?;
        if fresh > 0 {
            let bytes = read_vec(&*file, known.read_to, fresh)?;
            let from_the_first = known.read_to == 0;
            known.read_to += known.replay(&bytes) as u64;
            if from_the_first && self.unmarked.load(Ordering::Acquire) {
                known.suspect_all();
            }
        }
        Ok(())
    }

    /// Writes lines, each for a file that is about to be published or was compared just now. Returns
    /// the number of the last one.
    pub(super) fn append(&self, lines: &[Line<'_>]) -> io::Result<u64> {
        self.append_behind(lock(&self.tail), lines)
    }

    /// The same, unless another thread is at the log: then nothing is written, and nobody waits.
    pub(super) fn append_if_free(&self, lines: &[Line<'_>]) {
        if let Ok(tail) = self.tail.try_lock() {
            // Whoever may do without these lines may do without them on a disk that refuses.
            let _ = self.append_behind(tail, lines);
        }
    }

    fn append_behind(&self, mut tail: MutexGuard<'_, Tail>, lines: &[Line<'_>]) -> io::Result<u64> {
        let mut text = String::new();
        let mut n = tail.next;
        for line in lines {
            n += 1;
            let time = self.disk.now() / 1_000_000_000;
            text += &written(line, &self.by, n, time)?;
        }
        // Numbers are used up even if the append fails: half of it may stand in the file.
        let first = tail.next + 1;
        tail.next = n;
        self.write(&mut tail, text)?;
        for (number, line) in (first..=n).zip(lines) {
            let waits = if line.checked {
                Pending::Nothing
            } else {
                Pending::Writing
            };
            tail.pending.insert(number, waits);
        }
        drop(tail);
        let mut table = lock(&self.table);
        if table.is_some() {
            self.refresh(&mut table)?;
        }
        Ok(n)
    }

    /// Says that everything so far is to be looked at again before it is used. False where the disk
    /// is full: then only this process knows.
    pub(super) fn mark_unclean(&self) -> io::Result<bool> {
        let text = Mark::Unclean.written()?;
        let written = self.write(&mut lock(&self.tail), text);
        let marked = match written.and_then(|()| self.sync_tail()) {
            Err(e) if full(&e) => false,
            other => other.map(|()| true)?,
        };
        let mut table = lock(&self.table);
        self.refresh(&mut table)?;
        self.unmarked.store(!marked, Ordering::Release);
        if !marked {
            table.get_or_insert_default().suspect_all();
        }
        Ok(marked)
    }

    /// Says that nothing is known of some files any more: what they held was wrong from the first.
    pub(super) fn forget(&self, subjects: &[Subject]) -> io::Result<()> {
        let mut text = String::new();
        for subject in subjects {
            let file = subject.path();
            text += &Mark::Forgotten { file }.written()?;
        }
        self.write(&mut lock(&self.tail), text)?;
        let mut table = lock(&self.table);
        self.refresh(&mut table)
    }

    /// Makes what was written safe from a power loss. The lock is not held meanwhile: who appends
    /// must not wait for a disk to sync.
    fn sync_tail(&self) -> io::Result<()> {
        let file = lock(&self.tail).file.clone();
        file.map_or(Ok(()), |file| file.sync())
    }

    fn write(&self, tail: &mut Tail, text: String) -> io::Result<()> {
        // A file that somebody has put away, or replaced, would take lines that nobody reads.
        let named = |id| self.disk.facts(&self.path).is_ok_and(|f| f.id == id);
        if tail.file.is_some() && !named(tail.id) {
            tail.file = None;
        }
        let fresh = tail.file.is_none();
        let file = match &mut tail.file {
            Some(file) => file,
            none => {
                let file = self.open_tail()?;
                tail.id = file.facts()?.id;
                none.insert(file)
            }
        };
        let cut = tail.broken || fresh && ends_cut(&**file)?;
        let text = if cut { format!("\n{text}") } else { text };
        let written = file.append(text.as_bytes());
        tail.broken = written.is_err();
        written
    }

    fn open_tail(&self) -> io::Result<Arc<dyn DiskFile>> {
        let opened = match self.disk.open(&self.path, How::Append) {
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => {
                remove_any(&*self.disk, &self.path)?;
                self.disk.open(&self.path, How::Append)
            }
            other => other,
        };
        opened.map(Arc::from)
    }

    /// Says under which name the file of line `n` was published, or that it was not.
    pub(super) fn settle(&self, n: u64, published: Option<PathBuf>) {
        let settled = published.map_or(Pending::Nothing, Pending::Published);
        lock(&self.tail).pending.insert(n, settled);
    }

    /// Makes every published file and its line safe from a power loss, and says so in the log.
    /// Returns how many files that were.
    pub(super) fn sync(&self) -> io::Result<usize> {
        let (upto, files) = self.take_settled();
        if files.is_empty() && upto == 0 {
            return Ok(0);
        }
        let done = self.sync_files(&files).and_then(|()| {
            self.sync_tail()?;
            if upto == 0 {
                return Ok(());
            }
            let by = self.by.clone();
            let mark = Mark::Synced { by, n: upto };
            self.write(&mut lock(&self.tail), mark.written()?)?;
            self.sync_tail()
        });
        if done.is_err() {
            let mut tail = lock(&self.tail);
            for (n, path) in &files {
                tail.pending.insert(*n, Pending::Published(path.clone()));
            }
        }
        done.map(|()| files.len())
    }

    /// The highest number below which nothing is still being written, and the files up to it.
    fn take_settled(&self) -> (u64, Vec<(u64, PathBuf)>) {
        let mut tail = lock(&self.tail);
        let writing = |(n, p): (&u64, &Pending)| matches!(p, Pending::Writing).then_some(*n);
        let first_open = tail.pending.iter().find_map(writing).unwrap_or(u64::MAX);
        let still_open = tail.pending.split_off(&first_open);
        let settled = std::mem::replace(&mut tail.pending, still_open);
        let upto = settled.keys().next_back().copied().unwrap_or(0);
        let files = settled.into_iter().filter_map(|(n, p)| match p {
            Pending::Published(path) => Some((n, path)),
            Pending::Writing | Pending::Nothing => None,
        });
        (upto, files.collect())
    }

    fn sync_files(&self, files: &[(u64, PathBuf)]) -> io::Result<()> {
        let mut folders: Vec<&Path> = Vec::new();
        for (_, path) in files {
            match self.disk.open(path, How::Read).and_then(|file| file.sync()) {
                Ok(()) => {}
                // Evicted meanwhile. Its folder is synced nevertheless: a name that comes back after
                // a power loss would stand for bytes that were never synced.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
            // The layer's folder may be new, and so may the one above it.
            folders.extend(path.ancestors().skip(1).take(2));
        }
        folders.sort_unstable();
        folders.dedup();
        folders
            .iter()
            .try_for_each(|folder| self.disk.sync_folder(folder))?;
        self.sync_roots()
    }

    /// Makes the model's own folder, and those above it, safe from a power loss. Once is enough: they
    /// are never removed; but the log itself may be new later.
    pub(super) fn sync_roots(&self) -> io::Result<()> {
        let rooted = self.rooted.load(Ordering::Acquire);
        let known = if rooted { 1 } else { self.above.len() };
        for folder in &self.above[..known.min(self.above.len())] {
            match self.disk.sync_folder(folder) {
                // The folder that holds the home may be one we may not even open.
                Err(_) if Some(folder) == self.above.last() && known > 1 => {}
                other => other?,
            }
        }
        self.rooted.store(true, Ordering::Release);
        Ok(())
    }
}

/// Whether the file ends within a line.
fn ends_cut(file: &dyn DiskFile) -> io::Result<bool> {
    let len = file.facts()?.len;
    Ok(len > 0 && read_vec(file, len - 1, 1)? != b"\n")
}
