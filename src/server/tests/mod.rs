mod hours;
mod replies;
mod requests;
mod safety;
mod scripted;
