//! A disk in memory that fails when told to, and forgets at a power loss what was not synced.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;

use super::dice::Dice;
use super::names::Change;
use super::names::Node;
use super::names::has_its_name;
use crate::store::disk::Disk;
use crate::store::disk::DiskFile;
use crate::store::disk::Facts;
use crate::store::disk::How;
use crate::store::disk::Kind;
use crate::store::disk::Listed;

/// What happens at the chosen operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It fails; the next one works again. Half of a write is done.
    Fail(io::ErrorKind),
    /// It is done, and nothing after it: the process is dead, or the power is gone.
    Stop,
}

#[derive(Clone, Debug, Default)]
struct Inode {
    data: Vec<u8>,
    synced: Vec<u8>,
    mtime: u64,
}

#[derive(Clone, Debug, Default)]
struct World {
    names: BTreeMap<PathBuf, Node>,
    synced_names: BTreeMap<PathBuf, Node>,
    changes: Vec<Change>,
    inodes: HashMap<u64, Inode>,
    /// Inode to handle.
    locks: HashMap<u64, u64>,
    numbers: u64,
    clock: u64,
    boot: u64,
    operations: u64,
    fault: Option<(u64, Fault)>,
    stopped: bool,
    capacity: u64,
    read_only: bool,
    /// Every lock is given to everybody, as some network mounts do.
    no_locks: bool,
    /// Most expert bytes ever seen after an operation.
    most: u64,
    /// Fewest bytes that ever stood under an expert's own name after an operation.
    shortest: Option<u64>,
    log: Vec<String>,
}

/// The disk. Cloning it gives the same one.
#[derive(Clone)]
pub(super) struct SimDisk(Arc<Mutex<World>>);

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimDisk")
    }
}

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    inode: u64,
    handle: u64,
    writes: bool,
}

impl SimDisk {
    pub(super) fn new() -> Self {
        let mut world = World {
            clock: 1_000_000_000_000,
            capacity: 1 << 40,
            ..World::default()
        };
        world.names.insert(PathBuf::from("/"), Node::Folder);
        world.synced_names = world.names.clone();
        SimDisk(Arc::new(Mutex::new(world)))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    /// Has the `n`-th operation from now on go wrong, counted from 1.
    pub(super) fn plan(&self, n: u64, fault: Fault) {
        let mut world = self.world();
        world.operations = 0;
        world.fault = Some((n, fault));
    }

    /// Whether the planned fault has happened.
    pub(super) fn happened(&self) -> bool {
        let world = self.world();
        world.fault.is_some_and(|(n, _)| world.operations >= n)
    }

    /// The process is dead. Everything it wrote is in the page cache.
    pub(super) fn killed(&self) {
        let mut world = self.world();
        world.locks.clear();
        world.stopped = false;
        world.fault = None;
    }

    /// The power is gone. What was synced is there; of the rest, whatever the dice say: changes of
    /// names each for itself, content of the synced length, the new length, or in between, zeros where
    /// the length was written before the bytes.
    pub(super) fn power_lost(&self, dice: &mut Dice) {
        let mut guard = self.world();
        let world = &mut *guard;
        world.locks.clear();
        world.stopped = false;
        world.fault = None;
        world.boot += 1;
        let mut names = world.synced_names.clone();
        for change in std::mem::take(&mut world.changes) {
            if dice.below(2) == 0 {
                change.apply(&mut names);
            }
        }
        // A file needs its folder.
        let folders: Vec<PathBuf> = names.keys().cloned().collect();
        for path in folders {
            let parent = path.parent();
            if parent.is_some_and(|p| names.get(p) != Some(&Node::Folder)) {
                names.remove(&path);
            }
        }
        for inode in world.inodes.values_mut() {
            if inode.data == inode.synced {
                continue;
            }
            let new = inode.data.len();
            match dice.below(4) {
                0 => {}
                1 => inode.data = inode.synced.clone(),
                2 => {
                    let mut zeros = inode.synced.clone();
                    zeros.resize(new, 0);
                    inode.data = zeros;
                }
                _ => {
                    let least = inode.synced.len().min(new);
                    let more = dice.below((new - least) as u64 + 1) as usize;
                    inode.data.truncate(least + more);
                }
            }
            inode.synced = inode.data.clone();
        }
        world.synced_names = names.clone();
        world.names = names;
    }

    /// A disk of its own with the same content.
    pub(super) fn fork(&self) -> Self {
        SimDisk(Arc::new(Mutex::new(self.world().clone())))
    }

    /// Nothing works any more until the process is dead or the power gone.
    pub(super) fn stop(&self) {
        self.world().stopped = true;
    }

    /// Puts a folder in a file's place.
    pub(super) fn replace_by_folder(&self, path: &Path) {
        self.world().names.insert(path.to_owned(), Node::Folder);
    }

    /// Bytes of all files.
    pub(super) fn used(&self) -> u64 {
        self.world().used()
    }

    /// How many bytes the disk holds.
    pub(super) fn set_capacity(&self, bytes: u64) {
        self.world().capacity = bytes;
    }

    /// Whether everything that changes anything is refused.
    pub(super) fn set_read_only(&self, read_only: bool) {
        self.world().read_only = read_only;
    }

    pub(super) fn without_locks(&self) {
        self.world().no_locks = true;
    }

    /// Most bytes of experts within the budget, published and temporary, that there ever were at once.
    pub(super) fn most(&self) -> u64 {
        self.world().most
    }

    /// Fewest bytes that there ever were under an expert's own name: `None` if none had its name.
    pub(super) fn shortest(&self) -> Option<u64> {
        self.world().shortest
    }

    pub(super) fn forget_most(&self) {
        self.world().most = 0;
    }

    /// All files below a folder with their lengths.
    pub(super) fn files(&self, folder: &Path) -> Vec<(PathBuf, u64)> {
        let world = self.world();
        let below = world.files().filter(|(path, _)| path.starts_with(folder));
        below.map(|(path, len)| (path.clone(), len)).collect()
    }

    /// Does what a faulty disk does to a file.
    pub(super) fn edit(&self, path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut world = self.world();
        let Some(Node::File(inode)) = world.names.get(path).copied() else {
            panic!("{}: no file", path.display());
        };
        edit(&mut world.inodes.get_mut(&inode).unwrap().data);
    }

    /// The last operations, for a failure's report.
    pub(super) fn tail(&self) -> String {
        let world = self.world();
        let from = world.log.len().saturating_sub(30);
        world.log[from..].join("\n")
    }
}

impl World {
    /// Counts an operation; `Err` if it fails. `Ok(true)` if half of it is to be done, then fail.
    fn begin(&mut self, what: &str, path: &Path) -> io::Result<Option<io::ErrorKind>> {
        if self.stopped {
            return Err(io::Error::other("the process is dead"));
        }
        self.operations += 1;
        let line = format!("{} {what} {}", self.operations, path.display());
        self.log.push(line);
        let harmless = "open facts list free read_at sync sync_folder try_lock unlock";
        if self.read_only && !harmless.split(' ').any(|name| name == what) {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        match self.fault {
            Some((n, Fault::Fail(kind))) if n == self.operations => Ok(Some(kind)),
            Some((n, Fault::Stop)) if n == self.operations => {
                self.stopped = true;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    fn whole(&mut self, what: &str, path: &Path) -> io::Result<()> {
        match self.begin(what, path)? {
            Some(kind) => Err(kind.into()),
            None => Ok(()),
        }
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.changes.push(change);
        self.look();
    }

    /// Every file and its length.
    fn files(&self) -> impl Iterator<Item = (&PathBuf, u64)> {
        self.names.iter().filter_map(|(path, node)| match node {
            Node::File(inode) => Some((path, self.inodes[inode].data.len() as u64)),
            Node::Folder => None,
        })
    }

    fn look(&mut self) {
        // Those of the model that the tests install without a limit are in no budget.
        let named = |path: &Path, name| path.components().any(|c| c.as_os_str() == name);
        let experts = |path: &Path| named(path, "experts") && !named(path, "org--whole");
        let bytes: u64 = self.files().filter(|f| experts(f.0)).map(|f| f.1).sum();
        let named = self.files().filter(|f| has_its_name(f.0)).map(|f| f.1);
        self.shortest = named.chain(self.shortest).min();
        self.most = self.most.max(bytes);
    }

    fn used(&self) -> u64 {
        self.files().map(|f| f.1).sum()
    }

    fn parent_is_folder(&self, path: &Path) -> io::Result<()> {
        match path.parent().and_then(|p| self.names.get(p)) {
            Some(Node::Folder) => Ok(()),
            Some(Node::File(_)) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn facts(&self, node: Node) -> Facts {
        match node {
            Node::Folder => Facts {
                kind: Kind::Folder,
                len: 0,
                mtime: 0,
                id: 0,
            },
            Node::File(id) => {
                let inode = &self.inodes[&id];
                Facts {
                    kind: Kind::File,
                    len: inode.data.len() as u64,
                    mtime: inode.mtime,
                    id,
                }
            }
        }
    }

    fn node(&self, path: &Path) -> io::Result<Node> {
        let node = self.names.get(path).copied();
        node.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for SimDisk {
    fn open(&self, path: &Path, how: How) -> io::Result<Box<dyn DiskFile>> {
        let mut world = self.world();
        world.whole("open", path)?;
        if world.read_only && how != How::Read {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let inode = match (world.names.get(path).copied(), how) {
            (Some(Node::Folder), _) => return Err(io::ErrorKind::IsADirectory.into()),
            (Some(_), How::CreateNew) => return Err(io::ErrorKind::AlreadyExists.into()),
            (Some(Node::File(inode)), _) => inode,
            (None, How::Read) => return Err(io::ErrorKind::NotFound.into()),
            (None, _) => {
                world.parent_is_folder(path)?;
                world.numbers += 1;
                let inode = world.numbers;
                world.inodes.insert(inode, Inode::default());
                world.change(Change::Add(path.to_owned(), Node::File(inode)));
                inode
            }
        };
        world.numbers += 1;
        Ok(Box::new(SimFile {
            disk: self.clone(),
            inode,
            handle: world.numbers,
            writes: how != How::Read,
        }))
    }

    fn facts(&self, path: &Path) -> io::Result<Facts> {
        let mut world = self.world();
        world.whole("facts", path)?;
        let node = world.node(path)?;
        Ok(world.facts(node))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>> {
        let mut world = self.world();
        world.whole("list", folder)?;
        if world.node(folder)? != Node::Folder {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let inside = world
            .names
            .iter()
            .filter(|(p, _)| p.parent() == Some(folder));
        let listed = inside.map(|(path, node)| Listed {
            name: path.file_name().unwrap().to_str().unwrap().to_owned(),
            facts: world.facts(*node),
        });
        Ok(listed.collect())
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut world = self.world();
        world.whole("create_folder", path)?;
        let mut missing: Vec<&Path> = Vec::new();
        for above in path.ancestors() {
            match world.names.get(above) {
                Some(Node::Folder) => break,
                Some(Node::File(_)) => return Err(io::ErrorKind::NotADirectory.into()),
                None => missing.push(above),
            }
        }
        for folder in missing.into_iter().rev() {
            world.change(Change::Add(folder.to_owned(), Node::Folder));
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut world = self.world();
        world.whole("rename", to)?;
        let node = world.node(from)?;
        world.parent_is_folder(to)?;
        if world.names.get(to) == Some(&Node::Folder) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        world.change(Change::Rename(from.to_owned(), to.to_owned(), node));
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut world = self.world();
        world.whole("link", to)?;
        let node = world.node(from)?;
        world.parent_is_folder(to)?;
        if world.names.contains_key(to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        world.change(Change::Add(to.to_owned(), node));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut world = self.world();
        world.whole("remove_file", path)?;
        if world.node(path)? == Node::Folder {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        world.change(Change::Remove(path.to_owned()));
        Ok(())
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let mut world = self.world();
        world.whole("remove_tree", path)?;
        world.node(path)?;
        world.change(Change::Remove(path.to_owned()));
        Ok(())
    }

    fn set_mtime(&self, path: &Path, mtime: u64) -> io::Result<()> {
        let mut world = self.world();
        world.whole("set_mtime", path)?;
        if let Node::File(inode) = world.node(path)? {
            world.inodes.get_mut(&inode).unwrap().mtime = mtime;
        }
        Ok(())
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut guard = self.world();
        let world = &mut *guard;
        world.whole("sync_folder", path)?;
        if world.node(path)? != Node::Folder {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let (synced, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut world.changes)
            .into_iter()
            .partition(|change| change.touches(path));
        world.changes = kept;
        for change in synced {
            change.apply(&mut world.synced_names);
        }
        Ok(())
    }

    fn free(&self, path: &Path) -> io::Result<u64> {
        let mut world = self.world();
        world.whole("free", path)?;
        Ok(world.capacity.saturating_sub(world.used()))
    }

    fn boot(&self) -> Option<String> {
        Some(format!("boot {}", self.world().boot))
    }

    fn now(&self) -> u64 {
        let mut world = self.world();
        world.clock += 1_000_000;
        world.clock
    }

    fn piece(&self) -> usize {
        128
    }
}

impl SimFile {
    fn write(&self, what: &str, bytes: &[u8], at: Option<u64>) -> io::Result<()> {
        let mut world = self.disk.world();
        assert!(self.writes, "{what} on a file that was opened for reading");
        let fail = world.begin(what, Path::new(&self.inode.to_string()))?;
        let free = world.capacity.saturating_sub(world.used());
        let inode = world.inodes.get_mut(&self.inode).unwrap();
        let at = at.map_or(inode.data.len(), |at| at as usize);
        let end = at + bytes.len();
        let grows = end.saturating_sub(inode.data.len()) as u64;
        let half = bytes.len() / 2;
        let (done, result) = match fail {
            Some(kind) => (&bytes[..half], Err(kind.into())),
            None if grows > free => (
                &bytes[..half.min(free as usize)],
                Err(io::ErrorKind::StorageFull.into()),
            ),
            None => (bytes, Ok(())),
        };
        if inode.data.len() < at + done.len() {
            inode.data.resize(at + done.len(), 0);
        }
        inode.data[at..at + done.len()].copy_from_slice(done);
        world.clock += 1;
        let clock = world.clock;
        world.inodes.get_mut(&self.inode).unwrap().mtime = clock;
        world.look();
        result
    }

    fn whole(&self, what: &str) -> io::Result<MutexGuard<'_, World>> {
        let mut world = self.disk.world();
        world.whole(what, Path::new(&self.inode.to_string()))?;
        Ok(world)
    }
}

impl DiskFile for SimFile {
    fn facts(&self) -> io::Result<Facts> {
        let world = self.whole("facts")?;
        Ok(world.facts(Node::File(self.inode)))
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let world = self.whole("read_at")?;
        let data = &world.inodes[&self.inode].data;
        let from = data.get(offset as usize..).unwrap_or_default();
        let from = from
            .get(..bytes.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(from);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write("write_at", bytes, Some(offset))
    }

    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        self.write("append", bytes, None)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut world = self.whole("set_len")?;
        let inode = world.inodes.get_mut(&self.inode).unwrap();
        inode.data.resize(len as usize, 0);
        world.look();
        Ok(())
    }

    fn set_mtime(&self, mtime: u64) -> io::Result<()> {
        let mut world = self.whole("set_mtime")?;
        world.inodes.get_mut(&self.inode).unwrap().mtime = mtime;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut world = self.whole("sync")?;
        let inode = world.inodes.get_mut(&self.inode).unwrap();
        inode.synced = inode.data.clone();
        Ok(())
    }

    fn try_lock(&self) -> io::Result<bool> {
        let mut world = self.whole("try_lock")?;
        let holder = *world.locks.entry(self.inode).or_insert(self.handle);
        Ok(world.no_locks || holder == self.handle)
    }

    fn unlock(&self) -> io::Result<()> {
        let mut world = self.whole("unlock")?;
        if world.locks.get(&self.inode) == Some(&self.handle) {
            world.locks.remove(&self.inode);
        }
        Ok(())
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        let mut world = self.disk.world();
        if world.locks.get(&self.inode) == Some(&self.handle) {
            world.locks.remove(&self.inode);
        }
    }
}
